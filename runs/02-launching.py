# %% [markdown]
# # Launching
#
# What torchrun tells each process on one node and on two, other launchers, the store at which the
# ranks meet, devices and backends, groups of some of the ranks, and a device mesh.

# %% name="setup"
import os
import re
import textwrap

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import miniddp
from book import provenance, record, show_ranks, table
from instruments import programs
from instruments.failures import failure_of, hang_of, last_line
from miniddp.process import device

provenance(device=device(), world_size=[2, 3, 4], backend="gloo")

# %% [markdown]
# ## Two nodes
#
# Two launchers, as on two machines, with two processes each. Both run on this machine.


# %% name="two-nodes" ranks="4"
def two_nodes(program: str, port: int) -> list[str]:
    """The same arguments for both: the launchers find out who is node 0."""
    meeting = ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}", "--rdzv_id=hello"]
    node = ["--nnodes=2", "--nproc_per_node=2", *meeting, program]
    return programs.run_launchers(node, node)


greetings = two_nodes("runs/hello.py", programs.free_port())
assert all(f"rank {r} of 4" in text and "sum is 10" in text for r, text in enumerate(greetings))
show_ranks(greetings)


# %% name="environment" ranks="4"
endpoint = programs.free_port()
told = [
    dict(line.split("=", 1) for line in text.splitlines())
    for text in two_nodes("runs/show_environment.py", endpoint)
]
for rank, environment in enumerate(told):
    node, local_rank = divmod(rank, 2)
    assert environment["RANK"] == str(rank)
    assert environment["GROUP_RANK"] == str(node)
    assert environment["LOCAL_RANK"] == str(local_rank)
    assert environment["WORLD_SIZE"] == "4"
    assert environment["LOCAL_WORLD_SIZE"] == "2"
master_port = int(told[0]["MASTER_PORT"])
assert master_port != endpoint, "the ranks meet at another store than the launchers"
record(endpoint=endpoint, master_port=master_port)
table(
    [[name, *(environment[name] for environment in told)] for name in told[0]],
    ["variable", *(f"rank {rank}" for rank in range(4))],
    align="lrrrr",
)

# %% [markdown]
# ## How the processes find each other
#
# A store: a server of keys and values. `get` waits until somebody has set the key.


# %% name="store" ranks="2"
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

# %% name="spawn" ranks="2"
spawned = programs.run_python("runs/hello_spawn.py")
lines = sorted(re.findall(r"rank \d of 2: I gave \d, our sum is \d", spawned))
assert [line[:6] for line in lines] == ["rank 0", "rank 1"]
show_ranks(lines)


# %% name="run-ranks" ranks="2"
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
# ## All ranks on one GPU


# %% name="nccl" ranks="1"
def own_number(rank: int) -> int:
    number = torch.tensor(rank, device=device())
    dist.all_reduce(number)
    return number.item()


on_gpu = device().type == "cuda"
ranks = torch.cuda.device_count() + 1 if on_gpu else 1
refused = failure_of(own_number, ranks, backend="nccl")  # nccl takes one rank per GPU
lines = next(iter(refused.tracebacks.values())).splitlines()
named = [line for line in lines if re.search("Duplicate GPU|same GPU", line)]
gpus = torch.cuda.device_count() if on_gpu else 0
print(f"{ranks} {'rank' if ranks == 1 else 'ranks'}, {gpus} {'GPU' if gpus == 1 else 'GPUs'}:")
print(textwrap.fill(last_line((named or lines)[-1]), 68, subsequent_indent="  "))

# %% [markdown]
# ## Backends

# %% name="backends"
rows = []
for name in ("gloo", "nccl", "mpi", "ucc", "xccl"):
    default_for = [
        kind for kind, default in dist.Backend.default_device_backend_map.items() if default == name
    ]
    available = dist.is_backend_available(name)
    rows.append([name, "yes" if available else "no", ", ".join(default_for) or "–"])
assert rows[0][1] == "yes"
table(rows, ["backend", "built in here", "default for"], align="lll")

# %% [markdown]
# ## Process groups
#
# Four ranks, as if on two nodes with two ranks each.


# %% name="groups" ranks="4"
def add_up_on_the_node(rank: int) -> tuple[int, int]:
    nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    node, other = nodes if rank < 2 else reversed(nodes)
    total = torch.tensor(rank + 1)
    dist.all_reduce(total, group=node)
    print(f"members: {dist.get_process_group_ranks(node)}")
    print(f"rank in the group: {dist.get_rank(node)}")
    print(f"rank in the other: {dist.get_rank(other)}")
    print(f"gave {rank + 1}, sum of the node: {total}")
    return dist.get_rank(node), total.item()


on_nodes = miniddp.run_ranks(add_up_on_the_node, 4)
assert on_nodes == [(0, 3), (1, 3), (0, 7), (1, 7)]
show_ranks(on_nodes)


# %% name="members-only" ranks="3"
def make_a_group_for_members_only(rank: int) -> None:
    if rank < 2:
        dist.new_group([0, 1])
        print("made a group of 0 and 1", flush=True)
    dist.new_group([0, 1, 2])
    print("made a group of all", flush=True)


hang = hang_of(make_a_group_for_members_only, 3, timeout=5)
assert {0, 1} <= hang.stacks.keys(), "whether rank 2 waits too depends on timing"
assert all("in new_group" in stack for stack in hang.stacks.values())
waits = {rank: "waits in new_group" for rank in hang.stacks}
show_ranks([text + waits.get(rank, "") for rank, text in enumerate(hang.outputs)])

# %% [markdown]
# ## A device mesh


# %% name="one-row" ranks="4"
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


# %% name="two-levels" ranks="4"
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
    program = programs.start_python(
        "-c", FORGETFUL, backend, kind, MASTER_PORT=str(programs.free_port())
    )
    _, errors = program.communicate(timeout=60)
    assert program.returncode == 0, errors
    said = [line for line in errors.splitlines() if "destroy_process_group" in line]
    return re.sub(r"^.*?(?=destroy_process_group)", "", said[0]) if said else "(says nothing)"


for backend, kind in [("gloo", "cpu"), *([("nccl", "cuda")] if on_gpu else [])]:
    print(f"{backend}: {complaint(backend, kind)}")
