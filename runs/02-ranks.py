# %% [markdown]
# # Two processes
#
# One program, started several times. This run launches it with torchrun and without, breaks the
# start in several ways, and lets one rank call what the other does not.

# %% name="setup"
import os
import re
import subprocess
import textwrap
from datetime import timedelta

import torch
import torch.distributed as dist

import miniddp
from book import provenance, record, show_ranks, table
from instruments import programs
from instruments.failures import failure_of, hang_of, last_line
from miniddp.process import device, init_process_group

provenance(device=device(), world_size=[2, 3], backend="gloo")
record(gloo_timeout_minutes=dist.constants.default_pg_timeout.total_seconds() / 60)


def say(text: str, indent: str = "") -> None:
    """Prints in lines that fit on a page."""
    print(textwrap.fill(text, 68, initial_indent=indent, subsequent_indent=f"{indent}  "))


# %% [markdown]
# ## Without a launcher

# %% name="no-launcher"
try:
    programs.run_python("stages/1_average.py")
except RuntimeError as error:
    message = last_line(str(error))
assert "environment variable RANK expected" in message
say(message)

# %% name="no-address"
try:
    dist.init_process_group("gloo", rank=0, world_size=2)
except ValueError as error:
    message = f"ValueError: {error}"
assert "environment variable MASTER_ADDR expected" in message
say(message)

# %% [markdown]
# ## One program, two processes

# %% name="hello" ranks="2"
greetings = programs.run_launchers(["--standalone", "--nproc_per_node=2", "runs/hello.py"])
assert greetings == [
    "rank 0 of 2: I gave 1, our sum is 3\n",
    "rank 1 of 2: I gave 2, our sum is 3\n",
]
show_ranks(greetings)


# %% name="memories" ranks="2"
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
# ## Starts that fail
#
# ### A machine that is down
#
# One of three launchers, which waits for the others.

# %% name="machine-down" ranks="0"
JOIN_TIMEOUT = 5
launcher = programs.start_python(
    *programs.TORCHRUN,
    "--nnodes=3",
    "--nproc_per_node=2",
    "--rdzv_backend=c10d",
    f"--rdzv_endpoint=127.0.0.1:{programs.free_port()}",
    f"--rdzv_conf=join_timeout={JOIN_TIMEOUT}",
    "runs/hello.py",
)
printed, errors = launcher.communicate(timeout=300)
assert "rank" not in printed
traceback = errors[errors.index("Traceback") :].splitlines()
assert traceback[-1].endswith("RendezvousTimeoutError")
print(traceback[0])
print(f"  ({len(traceback) - 2} lines more)")
print(traceback[-1])
record(join_timeout=JOIN_TIMEOUT)

# %% [markdown]
# ### A rank that does not come


# %% name="never-starts" ranks="3"
def start_without(rank: int, missing: int) -> None:
    if rank != missing:
        init_process_group("gloo", timeout=timedelta(seconds=2))


def errors_of(*call: object) -> dict[int, str]:
    """The last line of each rank's error."""
    tracebacks = failure_of(*call, backend=None).tracebacks
    return {rank: last_line(text) for rank, text in tracebacks.items()}


messages = errors_of(start_without, 3, 2)
assert sorted(messages) == [0, 1]
assert all(re.search(r"after 2000ms, keys: .*/2$", message) for message in messages.values())
short = {rank: re.sub(r"keys: .*(?=/2$)", "keys: …", text) for rank, text in messages.items()}
show_ranks([short.get(rank, "(never joins)") for rank in range(3)])


# %% name="never-starts-by-hand" ranks="3"
def start_by_hand_without(rank: int, missing: int, port: int) -> None:
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]  # without a launcher, rank 0 opens the store
    os.environ["MASTER_PORT"] = str(port)
    start_without(rank, missing)


messages = errors_of(start_by_hand_without, 3, 2, programs.free_port())
assert "2/3 clients joined" in messages[0]
assert re.search(r"keys: .*/0$", messages[1])
short = {rank: re.sub(r"keys: .*(?=/0$)", "keys: …", text) for rank, text in messages.items()}
show_ranks([short.get(rank, "(never joins)") for rank in range(3)])

# %% [markdown]
# ### Two programs on one port
#
# Two jobs of two ranks, all four told to meet at the same port.


# %% name="same-port" ranks="2"
def start_by_hand(rank: int, port: int) -> subprocess.Popen[str]:
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return programs.start_python("runs/hello.py", RANK=str(rank), WORLD_SIZE="2", **meeting)


PATIENCE = 10
port = programs.free_port()
first = start_by_hand(0, port)
programs.wait_for_listener(port)
second = start_by_hand(0, port)
in_use = last_line(second.communicate(timeout=60)[1])
stranger = start_by_hand(1, port)
joined = [job.communicate(timeout=60)[0].strip() for job in (first, stranger)]
late = start_by_hand(1, port)
try:
    late.wait(PATIENCE)
    raise AssertionError("it did not wait")
except subprocess.TimeoutExpired:
    late.kill()
assert "EADDRINUSE" in in_use
assert joined[0].startswith("rank 0 of 2: I gave 1, our sum is 3")
assert joined[1].startswith("rank 1 of 2: I gave 2, our sum is 3")
said = {
    "first job, rank 0": joined[0],
    "second job, rank 0": in_use,
    "second job, rank 1": joined[1],
    "first job, rank 1, which starts last": f"(no output, waits after {PATIENCE} s)",
}
for who, text in said.items():
    print(f"{who}:")
    say(text, indent="  ")

# %% [markdown]
# ### A collective that one rank alone calls


# %% name="one-sided" ranks="2"
def log_on_rank_0(rank: int) -> None:
    loss = torch.tensor(1.0, device=device())
    if rank == 0:
        dist.all_reduce(loss)
        print("mean loss:", loss / 2)
    dist.barrier()


hang = hang_of(log_on_rank_0, 2, timeout=5)
assert str(hang).startswith("ranks 0, 1 of 2 did not end within 5 s")
assert "in all_reduce" in hang.stacks[0]
assert "in barrier" in hang.stacks[1]
lines = [line for line in str(hang).splitlines() if "in wrapper" not in line]
print(re.sub(r"\S+/torch/distributed/", '"', "\n".join(lines)))

# %% [markdown]
# ## Stage 1 and stage 2
#
# The same training, before and after each rank chooses its device. With fewer than two GPUs both
# stay on the CPU.

# %% name="stages" ranks="2"
few = {"STEPS": "40"}
if torch.cuda.device_count() < 2:
    few["CUDA_VISIBLE_DEVICES"] = ""
before = programs.step_losses(programs.run_torchrun(2, "stages/1_average.py", **few))
after = programs.step_losses(programs.run_torchrun(2, "stages/2_ranks.py", **few))
assert list(before) == list(after) == [20, 40]
assert all(abs(before[step] - after[step]) < 0.01 for step in before)
rows = [[str(step), f"{before[step]:.4f}", f"{after[step]:.4f}"] for step in before]
table(rows, ["step", "stage 1", "stage 2"])
