"""Ranks, groups, devices and seeds."""

import json
import os
import random
import socket
import subprocess
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from miniddp import process
from miniddp.backend import agree
from miniddp.launch import RankResults
from miniddp.process import (
    check_group,
    destroy_process_group,
    device,
    get,
    init_process_group,
    set_seed,
)

from . import ranks
from .ranks import run

NAMES = ("rank", "grank", "lrank", "ws")


def message(function: Any, *args: Any) -> str:
    try:
        function(*args)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def ask(rank: int) -> dict[str, Any]:
    """Everything about four ranks on a 2 x 2 mesh: columns are {0, 2} and {1, 3}."""
    init_process_group()
    os.environ["LOCAL_RANK"] = str(rank % 2)  # as on two machines
    answers: dict[str, Any] = {"plain": [get(name) for name in NAMES]}
    answers["backend"] = dist.get_backend()
    answers["plain members"] = dist.get_process_group_ranks(get("pg"))
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("replica", "shard"))
    answers["passed"] = [get(name, mesh["replica"]) for name in NAMES]
    answers["two dimensions"] = message(get, "rank", mesh)
    get.register_mesh(mesh["replica"])
    answers["registered"] = [get(name) for name in NAMES]
    answers["members"] = dist.get_process_group_ranks(get("pg"))
    answers["other mesh wins"] = [get(name, mesh["shard"]) for name in NAMES]
    get.register_mesh(None)
    answers["forgotten"] = [get(name) for name in NAMES]
    answers["unknown"] = message(get, "world")
    only_zero = dist.new_group([0])
    answers["outsider"] = message(check_group, only_zero)
    get.register_mesh(mesh["replica"])
    destroy_process_group()
    answers["after the end"] = message(get, "rank")
    return answers


@pytest.fixture(scope="module")
def answers() -> RankResults:
    return run(ask, 4, backend=None)


def test_get_without_a_mesh(answers: RankResults) -> None:
    for rank, answer in enumerate(answers):
        assert answer["plain"] == answer["forgotten"] == [rank, rank, rank % 2, 4]
        assert answer["plain members"] == [0, 1, 2, 3]
        assert answer["backend"] == (BOTH if ranks.gpus() >= 4 else "gloo")


def test_get_with_a_mesh(answers: RankResults) -> None:
    for rank, answer in enumerate(answers):
        row, column = divmod(rank, 2)
        assert answer["passed"] == answer["registered"] == [row, rank, row, 2]
        assert answer["other mesh wins"] == [column, rank, column, 2]
        assert answer["members"] == [column, column + 2]


def test_get_says_what_is_wrong_on_every_rank(answers: RankResults) -> None:
    for answer in answers:
        assert answer["unknown"] == (
            "ValueError: get knows rank, grank, lrank, ws, pg, not 'world'"
        )
        assert "this one has 2: pass one of ('replica', 'shard')" in answer["two dimensions"]
        assert answer["after the end"].startswith("RuntimeError: there is no process group: call")


def test_check_group_knows_its_members(answers: RankResults) -> None:
    assert answers[0]["outsider"] == "no error"
    for rank in (1, 2, 3):
        expected = f"ValueError: rank {rank} is not a member of the process group it passed"
        assert answers[rank]["outsider"] == expected


def test_nothing_works_without_a_process_group() -> None:
    with pytest.raises(RuntimeError, match="there is no process group: call"):
        get("rank")
    with pytest.raises(RuntimeError, match="there is no process group"):
        check_group()


def test_start_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RuntimeError, match="RANK is not set: start this program with torchrun"):
        init_process_group()


def test_start_by_hand() -> None:
    init_process_group(ranks.backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert [get(name) for name in NAMES] == [0, 0, 0, 1]
        with pytest.raises(RuntimeError, match="the default process group has started already"):
            init_process_group(ranks.backend)
    finally:
        destroy_process_group()
    assert not dist.is_initialized()
    destroy_process_group()


# Which backend: real ranks, over gloo, that pretend to see GPUs


Sight = list[list[str]]
"""The GPUs that each rank sees, in its own order."""


def pretend_to_see(gpus: list[str], started: list[Any]) -> None:
    """From here on this process sees `gpus` and has NCCL. What torch starts goes over gloo."""
    real = dist.init_process_group

    def start(backend: str, *args: Any, device_id: Any = None, **kwargs: Any) -> None:
        started.append((backend, device_id))
        real("gloo", *args, **kwargs)

    dist.init_process_group = start
    dist.is_nccl_available = lambda: True
    torch.cuda.is_available = lambda: bool(gpus)
    torch.cuda.device_count = lambda: len(gpus)
    torch.cuda.set_device = started.append
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=gpus[device.index])


class Start(NamedTuple):
    """What a rank has seen of a start."""

    backend: str
    device: str
    device_id: str
    warned: list[str]


def start_and_tell(gpus: list[str], asked: str | None, **place: Any) -> Start | str:
    """Start the group, use it, end it; the error if there is one."""
    started: list[Any] = []
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        for name in ("init_process_group", "is_nccl_available"):
            patch.setattr(dist, name, getattr(dist, name))  # gives it back afterwards
        for name in ("is_available", "device_count", "set_device", "get_device_properties"):
            patch.setattr(torch.cuda, name, getattr(torch.cuda, name))
        pretend_to_see(gpus, started)
        warnings.simplefilter("always")
        try:
            init_process_group(asked, **place)
        except (RuntimeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        *chosen, (backend, device_id) = started
        assert chosen == ([device()] if gpus else []), "the GPU is chosen before the group starts"
        total = torch.tensor(dist.get_rank())
        dist.all_reduce(total)
        assert total == sum(range(dist.get_world_size()))
        told = Start(backend, str(device()), str(device_id), [str(w.message) for w in caught])
        destroy_process_group()
        return told


def machine(*gpus: str, ranks: int) -> Sight:
    """Ranks that all see the same GPUs."""
    return [list(gpus)] * ranks


def each_its_own(*gpus: str) -> Sight:
    """Ranks that see one GPU each, as with SLURM's `--gpus-per-task=1`."""
    return [[gpu] for gpu in gpus]


def start_all(rank: int, starts: list[tuple[Sight, list[str | None]]]) -> list[Start | str | None]:
    """One start after the other, each with a store of its own, in the same processes."""
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False)
    told: list[Start | str | None] = []
    for number, (sight, asked) in enumerate(starts):
        size = len(sight)
        if rank >= size:
            told.append(None)
            continue
        os.environ["LOCAL_RANK"] = str(rank % 4 if size > 4 else rank)  # two machines, or one
        place = dist.PrefixStore(str(number), store)
        told.append(
            start_and_tell(sight[rank], asked[rank], store=place, rank=rank, world_size=size)
        )
    return told


A = ("a0", "a1", "a2", "a3")
B = ("b0", "b1", "b2", "b3")
BOTH = "cpu:gloo,cuda:nccl"
NOBODY: list[str | None] = [None] * 8
DIFFERENT = (
    "ValueError: the ranks ask for different backends, {}: "
    "pass the same one on every rank, or none on any"
)
STARTS: dict[str, tuple[Sight, list[str | None]]] = {
    "no GPU anywhere": (machine(ranks=2), NOBODY),
    "one rank, one GPU": (machine("a0", ranks=1), NOBODY),
    "a GPU for each": (machine(*A, ranks=4), NOBODY),
    "more GPUs than ranks": (machine(*A, ranks=3), NOBODY),
    "two machines": (machine(*A, ranks=4) + machine(*B, ranks=4), NOBODY),
    "each sees its own": (each_its_own(*A, *B), NOBODY),
    "two see the same one": (each_its_own("a0", "a1", "a1"), NOBODY),
    "in another order": (each_its_own("a1", "a0"), NOBODY),
    "orders that meet": ([["a0", "a1"], ["a1", "a0"]], NOBODY),
    "two ranks on one GPU": (machine("a0", ranks=2), NOBODY),
    "half on one machine": (machine(*A, ranks=4) + machine(*B[:2], ranks=4), NOBODY),
    "none on one machine": (machine(*A, ranks=4) + machine(ranks=4), NOBODY),
    "asked for": (machine("a0", ranks=2), ["nccl", "nccl"]),
    "asked in capitals": (machine(*A, ranks=2), ["NCCL", "nccl"]),
    "asked by one": (machine(*A, ranks=3), [None, "gloo", None]),
    "asked for two": (machine(*A, ranks=8), [None, "nccl", *["gloo"] * 6]),
    "both and one": (machine(*A, ranks=2), [BOTH, "nccl"]),
}


@pytest.fixture(scope="module")
def starts() -> dict[str, list[Any]]:
    told = run(start_all, 8, list(STARTS.values()), backend=None, default_device=False)
    by_start = zip(*told, strict=True)
    return {
        name: [one for one in all_ranks if one is not None]
        for name, all_ranks in zip(STARTS, by_start, strict=True)
    }


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("one rank, one GPU", ["cuda:0"]),
        ("a GPU for each", ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        ("more GPUs than ranks", ["cuda:0", "cuda:1", "cuda:2"]),
        ("two machines", ["cuda:0", "cuda:1", "cuda:2", "cuda:3"] * 2),
        ("each sees its own", ["cuda:0"] * 8),
        ("in another order", ["cuda:0", "cuda:0"]),
    ],
)
def test_a_gpu_for_each_rank_means_nccl(
    starts: dict[str, list[Any]], name: str, devices: list[str]
) -> None:
    assert starts[name] == [Start(BOTH, device, device, []) for device in devices]


def test_without_gpus_nobody_speaks_of_them(starts: dict[str, list[Any]]) -> None:
    assert starts["no GPU anywhere"] == [Start("gloo", "cpu", "None", [])] * 2


@pytest.mark.parametrize(
    ("name", "devices", "reason"),
    [
        ("two ranks on one GPU", ["cuda:0"] * 2, "ranks 0 and 1 have the same GPU"),
        ("two see the same one", ["cuda:0"] * 3, "ranks 1 and 2 have the same GPU"),
        ("orders that meet", ["cuda:0", "cuda:1"], "ranks 0 and 1 have the same GPU"),
        (
            "half on one machine",
            ["cuda:0", "cuda:1", "cuda:2", "cuda:3", *["cuda:0", "cuda:1"] * 2],
            "ranks 4 and 6 have the same GPU",
        ),
        (
            "none on one machine",
            ["cuda:0", "cuda:1", "cuda:2", "cuda:3", *["cpu"] * 4],
            "rank 4 has no GPU that NCCL can use",
        ),
    ],
)
def test_one_rank_that_cannot_takes_all_to_gloo_and_rank_0_says_why(
    starts: dict[str, list[Any]], name: str, devices: list[str], reason: str
) -> None:
    first, *others = starts[name]
    (said,) = first.warned
    assert said.startswith(f"{reason}: all ranks use gloo")
    assert "\n" not in said
    assert first[:3] == ("gloo", devices[0], "None")
    assert others == [Start("gloo", device, "None", []) for device in devices[1:]]


def test_what_was_asked_for_is_taken_without_a_word(starts: dict[str, list[Any]]) -> None:
    assert starts["asked for"] == [Start("nccl", "cuda:0", "cuda:0", [])] * 2
    for one in starts["asked in capitals"]:
        assert (one.backend.lower(), one.warned) == ("nccl", [])
    assert [one.backend for one in starts["asked by one"]] == ["gloo"] * 3
    assert not any(one.warned for one in starts["asked by one"])


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("asked for two", "rank 1 for nccl and rank 2 for gloo"),
        ("both and one", f"rank 0 for {BOTH} and rank 1 for nccl"),
    ],
)
def test_different_backends_are_one_line_on_every_rank(
    starts: dict[str, list[Any]], name: str, asked: str
) -> None:
    line = DIFFERENT.format(asked)
    assert starts[name] == [line] * len(STARTS[name][0])


def start_by_hand(rank: int, url: str, asked: list[str | None]) -> Start | str:
    """Without a launcher: rank 0 has the store, and ends first."""
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    del os.environ["LOCAL_RANK"]
    place = {"init_method": url, "rank": rank, "world_size": len(asked)}
    if rank:
        time.sleep(0.2 * rank)
    return start_and_tell(list(A), asked[rank], **place)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_the_store_of_rank_0_stays_until_all_have_read_that_they_differ() -> None:
    asked = ["gloo", "nccl", "gloo", "gloo"]
    line = DIFFERENT.format("rank 0 for gloo and rank 1 for nccl")
    url = f"tcp://127.0.0.1:{free_port()}"
    assert run(start_by_hand, 4, url, asked, backend=None) == [line] * 4


@pytest.mark.parametrize("world_size", [1, -1])
def test_a_rank_that_the_world_has_no_place_for(world_size: int) -> None:
    with pytest.raises(ValueError, match=f"rank 1 needs a larger world_size than {world_size}"):
        init_process_group("gloo", store=dist.HashStore(), rank=1, world_size=world_size)


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_ranks_that_were_started_by_hand_take_the_gpu_of_their_number(
    scheme: str, tmp_path: Path
) -> None:
    url = f"tcp://127.0.0.1:{free_port()}" if scheme == "tcp" else f"file://{tmp_path}/store"
    told = run(start_by_hand, 3, url, [None] * 3, backend=None, default_device=False)
    assert told == [Start(BOTH, f"cuda:{rank}", f"cuda:{rank}", []) for rank in range(3)]


def agree_twice(rank: int) -> list[str]:
    """In one store, and rank 1 comes late: rank 0 must not read its first answer again."""
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False)
    agreed = []
    for backend in ("gloo", "nccl"):
        if rank == 1:
            time.sleep(0.3)
        agreed.append(agree(store, rank, 2, backend, torch.device("cpu")))
        store.set(f"{backend} on rank {rank}", "")
        store.wait([f"{backend} on rank {peer}" for peer in range(2)])
    return agreed


def test_a_second_start_reads_nothing_of_the_first() -> None:
    assert run(agree_twice, 2, backend=None) == [["gloo", "nccl"]] * 2


def agree_after_a_crash(rank: int) -> str:
    """In the first start of these ranks, rank 1 died before it came here."""
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False)
    if rank == 0:
        store.set_timeout(timedelta(milliseconds=100))
        with pytest.raises(dist.DistStoreError, match=r"keys: .*/1$"):
            agree(store, 0, 2, None, torch.device("cpu"))
        store.set_timeout(timedelta(seconds=30))
        store.set("rank 1 may come", "")
    store.wait(["rank 1 may come"])
    return agree(store, rank, 2, None, torch.device("cpu"))


def test_a_start_that_came_to_nothing_is_forgotten() -> None:
    assert run(agree_after_a_crash, 2, backend=None) == ["gloo", "gloo"]


PRETENDING = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from tests.package.test_process import start_and_tell
sight = json.loads(sys.argv[2])[int(os.environ["RANK"])]
told = start_and_tell(sight, None)
line = json.dumps([int(os.environ["RANK"]), *told])
sys.stdout.write(line + "\\n")  # at once: the other rank writes there, too
"""


def torchrun(folder: Path, sight: Sight, nodes: int) -> list[Start]:
    """What the ranks of `nodes` launchers on this machine tell."""
    program = folder / "pretending.py"
    program.write_text(PRETENDING)
    meeting = ["--standalone"]
    if nodes > 1:
        meeting = ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{free_port()}"]
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", *meeting]
    command.append(f"--nproc_per_node={len(sight) // nodes}")
    command += [str(program), str(Path(__file__).parents[2]), json.dumps(sight)]
    launchers = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(nodes)
    ]
    lines = []
    for launcher in launchers:
        output, errors = launcher.communicate(timeout=120)
        assert launcher.returncode == 0, errors
        lines += [json.loads(line) for line in output.splitlines()]
    return [Start(*told) for _, *told in sorted(lines)]


def test_torchrun_on_one_machine_with_a_gpu_for_each(tmp_path: Path) -> None:
    told = torchrun(tmp_path, machine(*A, ranks=2), nodes=1)
    assert told == [Start(BOTH, f"cuda:{rank}", f"cuda:{rank}", []) for rank in range(2)]


def test_torchrun_on_two_machines_of_which_one_has_too_few(tmp_path: Path) -> None:
    first, *others = torchrun(tmp_path, machine("a0", "a1", ranks=2) + machine("b0", ranks=2), 2)
    assert first.warned[0].startswith("ranks 2 and 3 have the same GPU: all ranks use gloo")
    assert {one.backend for one in (first, *others)} == {"gloo"}
    assert [one.device for one in (first, *others)] == ["cuda:0", "cuda:1", "cuda:0", "cuda:0"]
    assert not any(one.warned for one in others)


SHARING = """
import sys
sys.path.insert(0, sys.argv[1])
from miniddp.process import destroy_process_group, init_process_group
from tests.package.test_process import pretend_to_see
pretend_to_see(["a0"], [])
init_process_group()
destroy_process_group()
"""


def test_the_line_is_seen_once_where_nothing_was_configured(tmp_path: Path) -> None:
    program = tmp_path / "sharing.py"
    program.write_text(SHARING)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(program), str(Path(__file__).parents[2])]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    seen = [line for line in ended.stderr.splitlines() if "have the same GPU" in line]
    (line,) = seen
    assert line.endswith(
        "sharing.py:7: UserWarning: ranks 0 and 1 have the same GPU: "
        "all ranks use gloo, as nccl needs a GPU for each"
    )


def test_device_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "5")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert process.device() == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert process.device() == torch.device("cuda", 1)


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), torch.rand(()).item()]


def test_a_seed_repeats_and_an_offset_differs() -> None:
    set_seed(7)
    first = draw()
    set_seed(7, rank_offset=1)
    offset = draw()
    set_seed(7)
    assert draw() == first
    assert all(a != b for a, b in zip(first, offset, strict=True))


@pytest.mark.parametrize("seed", [-1, 2**32, 2**40 + 3])
def test_any_integer_is_a_seed(seed: int) -> None:
    set_seed(seed)
    first = draw()
    set_seed(seed)
    assert draw() == first


WITHOUT = """
import sys
for blocked in sys.argv[1:]:
    sys.modules[blocked] = None
import torch
import torch.distributed as dist
import miniddp
import miniddp.bucket, miniddp.ddp, miniddp.naive, miniddp.replicate, miniddp.ring, miniddp.sampler
from miniddp.process import destroy_process_group, init_process_group

init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
miniddp.set_seed(0)
miniddp.ring.all_reduce(torch.ones(3))
print(list(miniddp.DistributedSampler(range(2), shuffle=False)))
if "numpy" not in sys.argv:
    ddp = miniddp.DistributedDataParallel(torch.nn.Linear(2, 1))
    ddp(torch.ones(1, 2)).sum().backward()
    print(ddp.module.weight.grad.tolist())
    miniddp.verify_replicas(ddp)
    miniddp.check_equal_steps(3)
destroy_process_group()
try:
    miniddp.run_ranks(print, 1)
except ImportError as error:
    print(error.name)
"""


@pytest.mark.parametrize(
    ("blocked", "printed"),
    [
        (["cloudpickle", "transformers", "datasets"], ["[0, 1]", "[[1.0, 1.0]]", "cloudpickle"]),
        # torch's own all_gather_object, with which the replicas are compared, needs NumPy
        (["cloudpickle", "transformers", "datasets", "numpy"], ["[0, 1]", "cloudpickle"]),
    ],
)
def test_torch_is_enough_for_all_but_run_ranks(blocked: list[str], printed: list[str]) -> None:
    program = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT, *blocked], capture_output=True, text=True
    )
    assert program.stdout.splitlines() == printed, program.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="reads the threads' names from /proc")
def test_the_group_ends_with_its_threads():
    """torch.optim imports functions with the group as default: they would keep it alive."""
    program = (
        "from pathlib import Path\n"
        "import torch, torch.distributed as dist\n"
        "from miniddp.process import destroy_process_group, init_process_group\n"
        "init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "torch.optim.SGD(torch.nn.Linear(1, 1).parameters())\n"
        "names = lambda: [file.read_text() for file in Path('/proc/self/task').glob('*/comm')]\n"
        "before = names()\n"
        "destroy_process_group()\n"
        "print(sum('gloo' in name for name in before), sum('gloo' in name for name in names()))\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    before, after = map(int, ended.stdout.split())
    assert before > 0
    assert after == 0
