# %% [markdown]
# # Two processes
#
# One program, started several times. This run launches it with torchrun on one node and on two,
# reads what the launcher tells each process, breaks the start in several ways, and makes process
# groups and a device mesh.

# %% name="setup"
import os
import re
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import hello
import hello_spawn
import miniddp
import show_environment
from book import provenance, record, show_ranks, table
from miniddp.launch import RanksFailed, RanksTimedOut
from miniddp.process import device, init_process_group

provenance(device=device(), world_size=[2, 3, 4], backend="gloo")


def last_line(error: BaseException | str) -> str:
    """The last line of a traceback, without the name of the error's module."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return re.sub(r"^(?:\w+\.)+(?=\w+Error)", "", lines[-1])


def say(text: str, indent: str = "") -> None:
    """Prints in lines that fit on a page."""
    print(textwrap.fill(text, 68, initial_indent=indent, subsequent_indent=f"{indent}  "))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


# %% [markdown]
# ## Without a launcher

# %% name="no-launcher"
STAGES = Path(hello.__file__).parent.parent / "stages"
TOLD = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
without = {name: value for name, value in os.environ.items() if name not in TOLD}
alone = subprocess.run(
    [sys.executable, STAGES / "1_average.py"],
    env=without, capture_output=True, text=True, timeout=120,
)  # fmt: skip
message = last_line(alone.stderr)
assert "environment variable RANK expected" in message
say(message)

# %% name="no-address"
try:
    with mock.patch.dict(os.environ, without, clear=True):
        dist.init_process_group("gloo", rank=0, world_size=2)
except ValueError as error:
    message = f"ValueError: {error}"
assert "environment variable MASTER_ADDR expected" in message
say(message)

# %% [markdown]
# ## One program, two processes


# %% name="hello"
def launch(*nodes: Sequence[str]) -> list[str]:
    """Starts one torchrun for each node, all at once; what the ranks printed, in their order."""
    with tempfile.TemporaryDirectory() as folder:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--redirects=3"]
        launchers = [
            subprocess.Popen(
                [*torchrun, f"--log-dir={folder}/{number}", *arguments],
                stderr=subprocess.PIPE,
                text=True,
            )
            for number, arguments in enumerate(nodes)
        ]
        try:
            for launcher in launchers:
                errors = launcher.communicate(timeout=240)[1]
                assert launcher.returncode == 0, errors
        finally:
            for launcher in launchers:
                launcher.kill()
        texts = [path.read_text() for path in Path(folder).rglob("stdout.log")]
        return sorted(filter(None, texts), key=lambda text: int(re.search(r"\d+", text)[0]))


greetings = launch(["--standalone", "--nproc_per_node=2", hello.__file__])
assert greetings == [
    "rank 0 of 2: I gave 1, our sum is 3\n",
    "rank 1 of 2: I gave 2, our sum is 3\n",
]
show_ranks(greetings)


# %% name="memories"
def add_on_rank_0(rank: int) -> float:
    weight = torch.zeros(())
    if rank == 0:
        weight += 1
    dist.barrier()
    print("weight:", weight)
    return weight.item()


weights = miniddp.run_ranks(add_on_rank_0, 2)
assert weights == [1, 0]
show_ranks(weights)

# %% [markdown]
# ## Two nodes
#
# Two launchers, as on two machines, with two processes each. Both run on this machine.


# %% name="two-nodes"
def two_nodes(program: str, port: int) -> list[str]:
    """The same arguments for both: the launchers find out who is node 0."""
    meeting = ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}", "--rdzv_id=hello"]
    return launch(*[["--nnodes=2", "--nproc_per_node=2", *meeting, program]] * 2)


greetings = two_nodes(hello.__file__, free_port())
assert all(f"rank {r} of 4" in text and "sum is 10" in text for r, text in enumerate(greetings))
show_ranks(greetings)


# %% name="environment"
def variables(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines())


endpoint = free_port()
told = [variables(text) for text in two_nodes(show_environment.__file__, endpoint)]
for rank, environment in enumerate(told):
    node, local_rank = divmod(rank, 2)
    assert environment["RANK"] == str(rank)
    assert environment["GROUP_RANK"] == str(node)
    assert environment["LOCAL_RANK"] == str(local_rank)
    assert environment["WORLD_SIZE"] == "4"
    assert environment["LOCAL_WORLD_SIZE"] == "2"
(master_port,) = {environment["MASTER_PORT"] for environment in told}
assert int(master_port) != endpoint, "the ranks meet at another store than the launchers"
table(
    [[name, *(it[name] for it in told)] for name in show_environment.NAMES],
    ["variable", *(f"rank {rank}" for rank in range(4))],
    align="lrrrr",
)

# %% [markdown]
# ## How the processes find each other
#
# A store: a server of keys and values. `get` waits until somebody has set the key.


# %% name="store"
def meet(rank: int) -> list[int]:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False)
    store.set(f"note of rank {rank}", f"rank {rank} was here")
    other = 1 - rank
    print("read:", store.get(f"note of rank {other}").decode())
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    dist.barrier()
    keys = [store.num_keys()]
    for _ in range(100):
        dist.all_reduce(torch.ones(1000))
    dist.barrier()
    keys.append(store.num_keys())
    print("keys at the start:    ", keys[0])
    print("100 all-reduces later:", keys[1])
    return keys


keys = miniddp.run_ranks(meet, 2, backend=None)
assert keys[0] == keys[1]
assert keys[0][0] == keys[0][1], "no all-reduce goes through the store"
show_ranks(keys)

# %% [markdown]
# ## Other launchers

# %% name="spawn"
spawned = subprocess.run(
    [sys.executable, hello_spawn.__file__], capture_output=True, text=True, timeout=60, check=True
)
lines = sorted(re.findall(r"rank \d of 2: I gave \d, our sum is \d", spawned.stdout))
assert [line[:6] for line in lines] == ["rank 0", "rank 1"]
show_ranks(lines)


# %% name="run-ranks"
def greet(rank: int, greeting: str) -> int:
    total = torch.tensor(rank + 1)
    dist.all_reduce(total)
    print(f"{greeting} from rank {rank} of {dist.get_world_size()}")
    return total.item()


sums = miniddp.run_ranks(greet, 2, "hello")
assert sums == [3, 3]
print("returned:", list(sums))
show_ranks(sums)

# %% [markdown]
# ## Starts that fail
#
# ### A rank that never starts


# %% name="never-starts"
def start_without(rank: int, missing: int) -> None:
    if rank != missing:
        init_process_group("gloo", timeout=timedelta(seconds=2))


def errors_of(*call: object) -> dict[int, str]:
    """The last line of each rank's error."""
    try:
        miniddp.run_ranks(*call, backend=None)
    except RanksFailed as failed:
        return {rank: last_line(text) for rank, text in failed.tracebacks.items()}
    raise AssertionError("somebody is missing")


messages = errors_of(start_without, 3, 2)
assert sorted(messages) == [0, 1]
assert all(re.search(r"after 2000ms, keys: .*/2$", message) for message in messages.values())
short = {rank: re.sub(r"keys: .*(?=/2$)", "keys: …", text) for rank, text in messages.items()}
show_ranks([short.get(rank, "(never joins)") for rank in range(3)])


# %% name="never-starts-by-hand"
def start_by_hand_without(rank: int, missing: int, port: int) -> None:
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]  # without a launcher, rank 0 opens the store
    os.environ["MASTER_PORT"] = str(port)
    start_without(rank, missing)


messages = errors_of(start_by_hand_without, 3, 2, free_port())
assert "2/3 clients joined" in messages[0]
assert re.search(r"keys: .*/0$", messages[1])
short = {rank: re.sub(r"keys: .*(?=/0$)", "keys: …", text) for rank, text in messages.items()}
show_ranks([short.get(rank, "(never joins)") for rank in range(3)])

# %% [markdown]
# ### Two programs on one port
#
# Two jobs of two ranks, both told to meet at the same port.


# %% name="same-port"
def start_by_hand(rank: int, port: int) -> subprocess.Popen:
    environment = {
        **without,
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    command = [sys.executable, hello.__file__]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_until_somebody_listens(port: int) -> None:
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.05)


port = free_port()
first = start_by_hand(0, port)
wait_until_somebody_listens(port)
second = start_by_hand(0, port)
in_use = second.communicate(timeout=60)[1]
stranger = start_by_hand(1, port)
said = {
    "first program": first.communicate(timeout=60)[0].strip(),
    "second program, rank 0": last_line(in_use),
    "second program, rank 1": stranger.communicate(timeout=60)[0].strip(),
}
assert "EADDRINUSE" in said["second program, rank 0"]
assert said["first program"].startswith("rank 0 of 2: I gave 1, our sum is 3")
assert said["second program, rank 1"].startswith("rank 1 of 2: I gave 2, our sum is 3")
for who, text in said.items():
    print(f"{who}:")
    say(text, indent="  ")

# %% [markdown]
# ### A collective that one rank alone calls


# %% name="one-sided"
def log_on_rank_0(rank: int) -> None:
    loss = torch.tensor(1.0, device=device())
    if rank == 0:
        dist.all_reduce(loss)
        print("mean loss:", loss / 2)
    dist.barrier()


try:
    miniddp.run_ranks(log_on_rank_0, 2, timeout=5)
except RanksTimedOut as timed_out:
    hang, stacks = str(timed_out), timed_out.stacks
assert hang.startswith("ranks 0, 1 of 2 did not end within 5 s")
assert "in all_reduce" in stacks[0]
assert "in barrier" in stacks[1]
lines = [line for line in hang.splitlines() if "in wrapper" not in line]
print(re.sub(r"\S+/torch/distributed/", '"', "\n".join(lines)))

# %% [markdown]
# ### All ranks on one GPU
#
# What `device()` takes for each local rank, on machines with different numbers of GPUs.


# %% name="devices"
def device_of(local_rank: int, gpus: int) -> torch.device:
    with (
        mock.patch("torch.cuda.is_available", return_value=gpus > 0),
        mock.patch("torch.cuda.device_count", return_value=gpus),
        mock.patch.dict(os.environ, {"LOCAL_RANK": str(local_rank)}),
    ):
        return device()


rows = [[gpus, *(device_of(local_rank, gpus) for local_rank in range(4))] for gpus in (0, 1, 2, 4)]
assert [str(cell) for cell in rows[-1][1:]] == [f"cuda:{local_rank}" for local_rank in range(4)]
assert {str(cell) for cell in rows[1][1:]} == {"cuda:0"}
table(rows, ["GPUs", "local rank 0", "1", "2", "3"], align="rllll")


# %% name="nccl"
def own_number(rank: int) -> int:
    number = torch.tensor(rank, device=device())
    dist.all_reduce(number)
    return number.item()


on_gpu = device().type == "cuda"
ranks = torch.cuda.device_count() + 1 if on_gpu else 1
try:
    miniddp.run_ranks(own_number, ranks, backend="nccl")
    raise AssertionError("nccl takes one rank per GPU")
except RanksFailed as failed:
    lines = next(iter(failed.tracebacks.values())).splitlines()
named = [line for line in lines if re.search("Duplicate GPU|same GPU", line)]
gpus = torch.cuda.device_count() if on_gpu else 0
print(f"{ranks} {'rank' if ranks == 1 else 'ranks'}, {gpus} {'GPU' if gpus == 1 else 'GPUs'}:")
say(last_line((named or lines)[-1]))

# %% [markdown]
# ## Backends

# %% name="backends"
rows = []
for name in ("gloo", "nccl", "mpi", "ucc", "xccl"):
    default_for = [
        kind for kind, it in dist.Backend.default_device_backend_map.items() if it == name
    ]
    available = dist.is_backend_available(name)
    rows.append([name, "yes" if available else "no", ", ".join(default_for) or "–"])
assert rows[0][1] == "yes"
table(rows, ["backend", "built in here", "default for"], align="lll")

# %% [markdown]
# ## Process groups
#
# Four ranks, as if on two nodes with two ranks each.


# %% name="groups"
def add_up_on_the_node(rank: int) -> tuple[int, int]:
    nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own = nodes[rank // 2]
    total = torch.tensor(rank + 1)
    dist.all_reduce(total, group=own)
    print(f"members: {dist.get_process_group_ranks(own)}")
    print(f"rank in the group: {dist.get_rank(own)}")
    print(f"rank in the other: {dist.get_rank(nodes[1 - rank // 2])}")
    print(f"gave {rank + 1}, sum of the node: {total}")
    return dist.get_rank(own), total.item()


on_nodes = miniddp.run_ranks(add_up_on_the_node, 4)
assert on_nodes == [(0, 3), (1, 3), (0, 7), (1, 7)]
show_ranks(on_nodes)


# %% name="members-only"
def make_a_group_for_members_only(rank: int) -> None:
    if rank < 2:
        dist.new_group([0, 1])
        print("made a group of 0 and 1", flush=True)
    dist.new_group([0, 1, 2])
    print("made a group of all", flush=True)


try:
    miniddp.run_ranks(make_a_group_for_members_only, 3, timeout=5)
except RanksTimedOut as timed_out:
    outputs, stacks = timed_out.outputs, timed_out.stacks
assert {0, 1} <= stacks.keys(), "whether rank 2 waits too depends on timing"
assert all("in new_group" in stack for stack in stacks.values())
waits = {rank: "waits in new_group" for rank in stacks}
show_ranks([text + waits.get(rank, "") for rank, text in enumerate(outputs)])

# %% [markdown]
# ## A device mesh


# %% name="mesh"
def answer(name: str, mesh: dist.DeviceMesh | None) -> str:
    found = miniddp.get(name, mesh)
    return str(found) if name != "pg" else " ".join(map(str, dist.get_process_group_ranks(found)))


def ask(rank: int) -> list[str]:
    os.environ |= {"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"}  # as on two nodes
    init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("inter", "intra"))
    print("      no mesh inter intra")
    for name in ("rank", "grank", "lrank", "ws", "pg"):
        alone, inter, intra = (answer(name, it) for it in (None, mesh["inter"], mesh["intra"]))
        print(f"{name:5} {alone:>7} {inter:>5} {intra:>5}")
    miniddp.get.register_mesh(mesh["inter"])
    found = [miniddp.get("rank"), miniddp.get("rank", mesh["intra"]), miniddp.get("grank")]
    miniddp.get.register_mesh(None)
    dist.barrier()  # a rank that ends now would break the others' connecting
    return found


on_mesh = miniddp.run_ranks(ask, 4, backend=None)
assert on_mesh == [[0, 0, 0], [0, 1, 1], [1, 0, 2], [1, 1, 3]]
show_ranks(on_mesh)


# %% name="one-row"
def make_a_row(rank: int) -> str:
    row = dist.DeviceMesh("cpu", [0, 1, 2, 3])
    print("[0, 1, 2, 3]:  ", dist.get_process_group_ranks(row.get_group()))
    try:
        return str(dist.DeviceMesh("cpu", [[0, 1, 2, 3]]).get_group())
    except RuntimeError as error:
        return error.args[0]


made = miniddp.run_ranks(make_a_row, 4)
assert set(made) == {"Found the DeviceMesh have 2 dimensions"}
print(made.outputs[0], end="")
print("[[0, 1, 2, 3]]:", made[0])


# %% name="two-levels"
def add_up_in_two_levels(rank: int) -> list[int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("inter", "intra"))
    total = torch.tensor(rank + 1)
    seen = [total.item()]
    for name in ("intra", "inter"):
        dist.all_reduce(total, group=mesh[name].get_group())
        seen.append(total.item())
    return seen


levels = miniddp.run_ranks(add_up_in_two_levels, 4)
assert levels == [[1, 3, 10], [2, 3, 10], [3, 7, 10], [4, 7, 10]]
table(
    [[rank, *seen] for rank, seen in enumerate(levels)],
    ["rank", "gives", "after intra", "after inter"],
)

# %% [markdown]
# ## Stage 1 and stage 2
#
# The same training, before and after each rank chooses its device. With fewer than two GPUs both
# stay on the CPU.


# %% name="stages"
def losses(stage: str) -> dict[str, str]:
    """What the training prints on two ranks: the loss at each step that it reports."""
    few = {"STEPS": "40"} | ({} if torch.cuda.device_count() > 1 else {"CUDA_VISIBLE_DEVICES": ""})
    with mock.patch.dict(os.environ, few):
        (text,) = launch(["--standalone", "--nproc_per_node=2", str(STAGES / stage)])
    return dict(re.findall(r"step +(\d+)  loss (\S+)", text))


before, after = losses("1_average.py"), losses("2_ranks.py")
assert list(before) == list(after) == ["20", "40"]
assert all(abs(float(before[step]) - float(after[step])) < 0.01 for step in before)
table([[step, before[step], after[step]] for step in before], ["step", "stage 1", "stage 2"])

# %% [markdown]
# ## The end
#
# A program that forgets `destroy_process_group`.

# %% name="forgotten"
FORGETFUL = """
import os, sys, torch, torch.distributed as dist
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
dist.init_process_group(sys.argv[1])
dist.all_reduce(torch.ones(1, device=sys.argv[2]))
"""


def complaint(backend: str, kind: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", FORGETFUL, backend, kind],
        env={**without, "MASTER_PORT": str(free_port())},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    said = [line for line in ended.stderr.splitlines() if "destroy_process_group" in line]
    return re.sub(r"^.*?(?=destroy_process_group)", "", said[0]) if said else "(says nothing)"


for backend, kind in [("gloo", "cpu"), *([("nccl", "cuda")] if on_gpu else [])]:
    print(f"{backend}: {complaint(backend, kind)}")

# %% name="values"
record(
    gloo_timeout_minutes=dist.constants.default_pg_timeout.total_seconds() / 60,
    keys=keys[0][0],
    endpoint=endpoint,
    master_port=int(master_port),
)
