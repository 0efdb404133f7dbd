"""Ranks, groups, devices and seeds."""

import os
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from miniddp import process
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
        assert answer["backend"] == ("nccl" if ranks.gpus() >= 4 else "gloo")


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
    finally:
        destroy_process_group()
    assert not dist.is_initialized()
    destroy_process_group()


@pytest.mark.parametrize(
    ("ranks_here", "gpus", "backend"),
    [("1", 0, "gloo"), ("1", 1, "nccl"), ("2", 1, "gloo"), ("2", 4, "nccl"), (None, 8, "nccl")],
)
def test_nccl_needs_a_gpu_for_every_rank_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, ranks_here: str | None, gpus: int, backend: str
) -> None:
    """Started by hand, without LOCAL_WORLD_SIZE, sixteen ranks on two machines take nccl too."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks_here is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks_here)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert process._backend() == backend
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert process._backend() == "gloo"


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
