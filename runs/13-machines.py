# %% [markdown]
# # Many machines, and failure
#
# Two launchers on one computer stand for two machines: they train on real sentence pairs, go on
# from a checkpoint after a rank has been killed, and then without one of the machines. Then ranks
# fail in every way that leaves others waiting, with a short timeout, to see what each of them says.

# %% name="setup"
import json
import logging
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from matplotlib.ticker import MaxNLocator
from torch import Tensor

import miniddp
from book import FOREGROUND, RANK_COLORS, data_dir, figure, provenance, record, show_ranks, table
from finetune import checkpoint, training_step
from finetune.options import parse_options
from finetune.state_file import read_state
from finetune.train import train
from finetune.watch import watching
from miniddp.launch import RanksFailed
from miniddp.process import destroy_process_group, device, init_process_group

RANKS_PER_NODE = 2
provenance(device=device(), world_size=[3, 4], backend="gloo")
here = Path("runs") if Path("runs/book.py").exists() else Path()
folder = Path(tempfile.mkdtemp(prefix="miniddp-"))


def first_pairs(count: int) -> str | None:
    """A folder with the first pairs of each MRPC file, so that the evaluation is short."""
    source = data_dir()
    if source is None:
        return None
    for path in source.glob("msr_paraphrase_*.txt"):
        lines = path.read_text(encoding="utf-8").splitlines()[: count + 1]
        (folder / path.name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(folder)


STEPS = 20
data = first_pairs(384)
options = ["--model", "tiny", "--batch-size", "4", "--steps", str(STEPS)]
options += ["--data-dir", data] if data else []

# %% [markdown]
# ## Two machines
#
# Each command runs in a launcher of its own, as it would on a machine of its own.


# %% name="launchers"
def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def start(
    *commands: Sequence[str], env: Mapping[str, str] | None = None
) -> list[subprocess.Popen[str]]:
    """One torchrun per command, all at once."""
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    return [
        subprocess.Popen(
            [*torchrun, f"--nproc_per_node={RANKS_PER_NODE}", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for command in commands
    ]


def wait_for(process: subprocess.Popen[str]) -> str:
    """What it printed, in short."""
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    return without_tracebacks(output)


def launch(*commands: Sequence[str], env: Mapping[str, str] | None = None) -> list[str]:
    return [wait_for(process) for process in start(*commands, env=env)]


def without_tracebacks(text: str) -> str:
    """The lines that say what happened: no frames, no data, no ids of processes, no ports."""
    kept = []
    for line in text.replace(f"{folder}/", "").splitlines():
        line = re.sub(r"^([WE])\d{4} \S+ \d+ \S*torch/distributed/", r"\1 ", line)
        line = re.sub(r"(?<=process )\d+", "…", line)
        line = re.sub(r" \(pid: \d+\).*|\[/\S+ |(?<=127\.0\.0\.1\]):\d+", "", line)
        line = re.sub(r" This is typically caused.*", "", line)
        if re.match(r"(\[rank\d\]: )?(Traceback| )|frame #|<omitting|Exception raised", line):
            continue
        if re.match(r"(train|test) data|tokenizer|model \w+:|loss:", line):
            continue
        kept.append(textwrap.fill(line, 76, subsequent_indent="    "))
    return "\n".join(line for line in kept if line.strip())


def narrow(text: str) -> str:
    """Lines that fit a phone."""
    lines = text.splitlines()
    return "\n".join(textwrap.fill(line, 36, subsequent_indent="  ") for line in lines)


def show(outputs: Sequence[str]) -> None:
    for node, output in enumerate(outputs):
        print(f"on machine {node}:")
        print(textwrap.indent(output or "(nothing)", "  "))


def static(node: int, port: int, *program: str) -> list[str]:
    """torchrun's options on machine `node` of two, where every machine has its number."""
    place = [f"--node_rank={node}", "--master_addr=127.0.0.1", f"--master_port={port}"]
    return ["--nnodes=2", *place, *program]


# %% name="check-link"
port = free_port()
program = str(here / "check_link.py")
outputs = launch(static(0, port, program), static(1, port, program))
assert "rank 2 of 4 = local rank 0 of node 1" in outputs[1]
show([narrow("\n".join(sorted(output.splitlines()))) for output in outputs])

# %% [markdown]
# ## A rank dies, and training goes on
#
# The machines meet by a rendezvous, so neither has a fixed number. After step 13 rank 1 is killed,
# once. Every fifth step is saved. A launcher names one failure: that of rank 0, which follows, if
# it was too busy to look in between. Then the run tries again.

# %% name="accident"
EVERY = 5
NEW_STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def saving_into(place: Path) -> list[str]:
    every = ["--checkpoint-every", str(EVERY), "--resume", "auto"]
    return [*options, "--checkpoint", str(place), *every]


def meeting(nodes: str) -> list[str]:
    """torchrun's options on machines that have no fixed numbers."""
    place = ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{free_port()}"]
    return [f"--nnodes={nodes}", *place, "--rdzv_id=mrpc", "--max_restarts=3"]


disturbed = folder / "disturbed"
program = [str(here / "accident.py"), *saving_into(disturbed)]
for _ in range(5):
    shutil.rmtree(disturbed, ignore_errors=True)
    disturbed.mkdir()
    command = [*meeting("2"), *program]
    outputs = launch(command, command, env=NEW_STORES)
    both = "\n".join(outputs)
    assert "resumed after step 10" in both
    if killed := "exitcode: -9" in both:
        break
assert killed, "no launcher has seen the signal"
show(outputs)

# %% name="accident-loss"
steps = [line.split() for line in (disturbed / "steps.txt").read_text().splitlines()]
numbers = [int(number) for number, _ in steps]
losses = [float(loss) for _, loss in steps]
restart = numbers.index(11, numbers.index(11) + 1)
first = dict(zip(numbers[:restart], losses[:restart], strict=True))
second = dict(zip(numbers[restart:], losses[restart:], strict=True))
assert list(first) == list(range(1, 14))
assert list(second) == list(range(11, STEPS + 1))
repeated = sorted(first.keys() & second.keys())
assert repeated == [11, 12, 13]
assert all(first[number] == second[number] for number in repeated), "the same, bit for bit"


def train_undisturbed(rank: int) -> None:
    logging.disable()
    train(parse_options([*options, "--checkpoint", str(undisturbed)]))


undisturbed = folder / "undisturbed"
miniddp.run_ranks(train_undisturbed, 4, timeout=100)
finished = [
    read_state(path / f"step-{STEPS:08d}.safetensors")[0] for path in (undisturbed, disturbed)
]
weights = [state["shared"]["model"] for state in finished]
assert weights[0].keys() == weights[1].keys()
assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])

fig, axes = plt.subplots()
axes.plot(list(first), list(first.values()), "-", color=FOREGROUND, label="before the accident")
axes.plot(
    *(list(second), list(second.values())), "--", color=RANK_COLORS[1], label="after the restart"
)
axes.axvline(13, color=RANK_COLORS[6], linestyle=":", label="rank 1 is killed")
axes.set(xlabel="step", ylabel="loss of rank 0")
axes.xaxis.set_major_locator(MaxNLocator(integer=True))
axes.legend()
figure(fig)

# %% name="accident-values"
record(accident_step=13, resumed_step=10, lost_steps=len(repeated), every=EVERY, last_step=STEPS)
record(compared_tensors=len(weights[0]))

# %% [markdown]
# ## A machine goes away
#
# When the checkpoint of step 10 is there, the second launcher is killed, and its ranks with it. The
# first one goes on alone.

# %% name="elastic"
shrunk = folder / "shrunk"
command = [*meeting("1:2"), "-m", "finetune", *saving_into(shrunk), "--elastic"]
first, second = start(
    ["--rdzv_conf=is_host=1", *command], ["--rdzv_conf=is_host=0", *command], env=NEW_STORES
)
deadline = time.monotonic() + 200
while not (shrunk / "step-00000010.safetensors").exists() and time.monotonic() < deadline:
    time.sleep(0.01)
second.kill()
lost = time.time()
second.communicate()
alone = wait_for(first)
assert "saved on 4 ranks, now there are 2: new random numbers" in alone
assert "on 2 ranks" in alone
show([alone])
seconds = (shrunk / "step-00000015.safetensors").stat().st_mtime - lost
print(f"from the loss of machine 1 until step 15 was saved: {seconds:.0f} s")
record(elastic_seconds=seconds)

# %% [markdown]
# ## How often to save
#
# The interval that loses least: the square root of twice the time to save times the mean time
# between failures. One machine is assumed to fail every 100 days; a checkpoint takes 30 seconds.

# %% name="interval"
SAVE_SECONDS, MACHINE_DAYS = 30, 100
rows = []
for machines in (1, 8, 64, 512):
    between_failures = MACHINE_DAYS * 86_400 / machines
    interval = math.sqrt(2 * SAVE_SECONDS * between_failures)
    lost = SAVE_SECONDS / interval + interval / (2 * between_failures)
    for other in (interval / 2, interval * 2):
        assert SAVE_SECONDS / other + other / (2 * between_failures) > lost
    rows.append(
        [
            machines,
            f"{between_failures / 3600:,.0f} h",
            f"{interval / 60:.0f} min",
            f"{100 * lost:.1f} %",
        ]
    )
table(rows, ["machines", "time between failures", "save every", "time lost"], align="rrrr")
record(save_seconds=SAVE_SECONDS, machine_days=MACHINE_DAYS)

# %% [markdown]
# ## A checkpoint that is killed while it is written
#
# A process is killed when half of the new checkpoint is on the disk: once where the file is
# overwritten in place, once with miniddp's `save`.


# %% name="crash-while-saving"
def killed_while_overwriting(rank: int, path: Path) -> None:
    state = torch.save({"weight": torch.zeros(100_000)}, path.with_suffix(".new"))
    new = path.with_suffix(".new").read_bytes()
    with path.open("wb") as file:
        file.write(new[: len(new) // 2])
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    return state


def killed_while_saving(rank: int, place: Path) -> None:
    os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    checkpoint.save(place, 2, {"model": {"weight": torch.zeros(100_000)}})


def save_first(rank: int, place: Path) -> None:
    checkpoint.save(place, 1, {"model": {"weight": torch.ones(100_000)}})


def find_latest(rank: int, place: Path) -> str:
    return checkpoint.latest(place).name


def expect_death(fn: Callable[..., object], *args: object) -> None:
    try:
        miniddp.run_ranks(fn, 1, *args)
        how = "was not killed"
    except RanksFailed as error:
        how = error.tracebacks[0]
    assert "SIGKILL" in how, how


overwritten = folder / "model.pt"
torch.save({"weight": torch.ones(100_000)}, overwritten)
expect_death(killed_while_overwriting, overwritten)
try:
    torch.load(overwritten)
except Exception as error:
    text = f"overwritten in place: {type(error).__name__}: {str(error).partition('.')[0]}"
    print(narrow(text))
else:
    raise AssertionError("half a file was loaded")

place = folder / "atomic"
miniddp.run_ranks(save_first, 1, place)
expect_death(killed_while_saving, place)
left = sorted(re.sub(r"\.\w+(?=\.unf)", ".…", path.name) for path in place.iterdir())
print("miniddp's save left:", *left, sep="\n  ")
newest = miniddp.run_ranks(find_latest, 1, place)[0]
assert newest == "step-00000001.safetensors"
print("the newest whole checkpoint:", newest, sep="\n  ")

# %% [markdown]
# ## Ways to wait for ever
#
# Three ranks, a timeout of two seconds, and rank 1 does something else. Each rank says what it saw.


# %% name="watch"
TIMEOUT = 2
record(timeout=TIMEOUT)
Work = Callable[[int], None]


def say(text: str) -> None:
    """Prints at once, in lines that are short enough for three ranks beside each other."""
    print(textwrap.fill(text, 28, subsequent_indent="  "), flush=True)


def short(error: Exception) -> str:
    """An error of Gloo without file names, ports and advice."""
    text = re.sub(r"^\[/\S+ | This is typically caused.*|:\d{2,5}(?=[ :.]|$)", "", str(error))
    text = re.sub(r", TensorDeviceTypes=.*?\)\)\)", ", …)", text)
    text = re.sub(r"\.Collectives differ.*", ".", text)
    text = text.replace("FingerPrint(", "FingerPrint( ")
    return f"{type(error).__name__}: {text.splitlines()[0]}"


def watched(rank: int, work: Work, detail: bool) -> None:
    if detail:  # in a program of its own: TORCH_DISTRIBUTED_DEBUG=DETAIL
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    torch.zeros(1, device=device())  # a GPU takes some time to start
    init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    try:
        dist.barrier()  # another rank may be gone before this one has left it
        work(rank)
    except Exception as error:
        if not isinstance(error, RuntimeError) or "llocat" in str(error):
            say(f"own error: {short(error).partition(' Error code')[0]}")
            raise
        say(short(error))
        time.sleep(TIMEOUT + 1)  # so that the others say what they saw before this rank is gone


def try_three(work: Work, detail: bool = False) -> list[str]:
    """What each of three ranks says; a rank that died or raised says how."""
    try:
        said = miniddp.run_ranks(watched, 3, work, detail, backend=None, timeout=30).outputs
    except RanksFailed as error:
        said = error.outputs
        for rank, text in error.tracebacks.items():
            if "was killed" in text:
                said[rank] = f"({text.splitlines()[0].removesuffix('; its last output:')})"
    said = [re.sub(r"(?m)^\[rank\d\]:\[E.*\n?", "", text).strip() for text in said]
    show_ranks([text or "(no error)" for text in said])
    return [" ".join(text.split()) for text in said]


def gist(said: str) -> str:
    """The words of a message that one would search for."""
    words = r"Connection \w+ by peer|Timed out waiting|killed by SIGKILL|can't allocate memory"
    found = re.search(words, said)
    return found[0] if found else "no error"


def keep(way: str, said: Sequence[str]) -> None:
    """For the page's table: rank 1's message, and those of the ranks that wait for it."""
    others = sorted({gist(said[0]), gist(said[2])})
    record(**{f"{way}_own": gist(said[1]), f"{way}_others": " or ".join(others)})


# %% [markdown]
# ### A rank dies


# %% name="dies"
def one_dies(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(4))


said = try_three(one_dies)
assert "SIGKILL" in said[1]
assert all("peer" in said[rank] for rank in (0, 2))
keep("dies", said)

# %% [markdown]
# ### A rank skips a collective and is busy with something else


# %% name="skips"
def one_skips(rank: int) -> None:
    if rank != 1:
        dist.all_reduce(torch.ones(4))
    else:
        time.sleep(2 * TIMEOUT + 2)  # such as: writes a file that only it writes


said = try_three(one_skips)
assert all("Timed out" in said[rank] for rank in (0, 2))
assert not said[1]
keep("skips", said)

# %% name="skips-detail"
said = try_three(one_skips, detail=True)
assert "Ranks 1 failed to pass monitoredBarrier" in said[0]
assert "rank 0" in said[2]

# %% [markdown]
# ### A rank has fewer batches


# %% name="unequal"
def uneven_batches(rank: int) -> None:
    for step in range(2 if rank == 1 else 3):
        dist.all_reduce(torch.ones(4))
        say(f"step {step} done")


said = try_three(uneven_batches)
assert "step 1 done" in said[1]
assert "step 2 done" not in "".join(said)
assert all("peer" in said[rank] for rank in (0, 2))
keep("unequal", said)

# %% [markdown]
# ### A rank calls another collective


# %% name="other-collective"
def another_collective(rank: int) -> None:
    tensor = torch.ones(4)
    if rank == 1:
        dist.broadcast(tensor, src=0)
    else:
        dist.all_reduce(tensor)


said = try_three(another_collective)
assert any("Timed out" in text for text in said)
assert all("Error" in text for text in said)
keep("other_collective", said)

# %% name="other-collective-detail"
said = try_three(another_collective, detail=True)
assert all("Detected mismatch" in text for text in said)
assert all("ALLREDUCE" in text for text in said)

# %% [markdown]
# ### A rank calls the same collectives in another order
#
# The sums should be 3 and 30.


# %% name="other-order"
def another_order(rank: int) -> None:
    ones, tens = torch.full((4,), 1.0), torch.full((4,), 10.0)
    first, second = (tens, ones) if rank == 1 else (ones, tens)
    dist.all_reduce(first)
    dist.all_reduce(second)
    say(f"ones: {ones[0].item():.0f}, tens: {tens[0].item():.0f}")


said = try_three(another_order)
assert said == ["ones: 12, tens: 21", "ones: 21, tens: 12", "ones: 12, tens: 21"]

# %% name="other-order-detail"
said_in_detail = try_three(another_order, detail=True)
assert said_in_detail == said

# %% [markdown]
# ### A rank has another shape


# %% name="shapes"
def another_shape(rank: int) -> None:
    tensor = torch.ones(5 if rank == 1 else 4)
    dist.all_reduce(tensor)
    say(f"result: {tensor.tolist()}")


said = try_three(another_shape)
assert "result" in said[0]
assert "[3.0, 3.0, 3.0, 3.0]" not in "".join(said)

# %% name="shapes-detail"
said = try_three(another_shape, detail=True)
assert all("Detected mismatch" in text for text in said)
assert "TensorShape=[5]" in said[1]

# %% [markdown]
# ### A rank runs out of memory
#
# Attention compares every token with every other one. Rank 1 gets one text of 20,000 tokens among
# its four, and all are padded to the longest.


# %% name="memory"
def uneven_lengths(rank: int) -> None:
    if device().type == "cuda":
        torch.cuda.set_per_process_memory_fraction(0.02)
    else:
        limit_memory(gigabytes=1)
    longest = 20_000 if rank == 1 else 40
    attended = attend(torch.ones(4, longest, 8, device=device()))
    dist.all_reduce(attended.mean().cpu())


def attend(tokens: Tensor) -> Tensor:
    scores = tokens @ tokens.transpose(1, 2)
    return scores.softmax(dim=-1) @ tokens


def limit_memory(gigabytes: float) -> None:
    """Lets this process take so much more memory than it has."""
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + int(gigabytes * 1e9)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


said = try_three(uneven_lengths)
assert "own error" in said[1]
assert "llocat" in said[1]
assert all("peer" in said[rank] for rank in (0, 2))
keep("memory", said)

# %% [markdown]
# ## Who is missing, who is slow?


# %% name="roll-call"
def roll_call(rank: int) -> None:
    if rank == 1:
        time.sleep(2 * TIMEOUT + 2)
    dist.monitored_barrier(timeout=timedelta(seconds=TIMEOUT), wait_all_ranks=True)


said = try_three(roll_call)
assert "Ranks 1 failed to pass monitoredBarrier" in said[0]

# %% [markdown]
# miniddp's training finds out by itself. Rank 1 sleeps in each step, then it is stuck in one.

# %% name="slow"
SLEEP = 0.5


def say_problems(rank: int) -> None:
    """Shows what `torchrun -m finetune` would: errors of any rank, warnings of rank 0."""
    level = logging.ERROR if rank else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stdout)


def train_after(before_a_step: Callable[[], None], rank: int) -> None:
    """A training in which rank 1 does something else first in each step."""
    say_problems(rank)
    in_time = training_step.train_step

    def late(*arguments: object, **named: object) -> Tensor:
        before_a_step()
        return in_time(*arguments, **named)

    if rank == 1:
        training_step.train_step = late
    with watching(PATIENCE):
        train(parse_options(options))


def sleep_a_little(rank: int) -> None:
    train_after(lambda: time.sleep(SLEEP), rank)


PATIENCE = 20
said = miniddp.run_ranks(sleep_a_little, 3, timeout=200).outputs
assert said[0].startswith("rank 1 is slow")
print(said[0].strip())
record(sleep_ms=round(1000 * SLEEP))


# %% name="stuck"
noticed = folder / "noticed"


def read_from_a_dead_disk() -> None:
    while not noticed.exists() or not noticed.read_text():
        time.sleep(0.1)


def be_stuck(rank: int) -> None:
    if rank == 0:
        logging.getLogger("finetune.watch").addHandler(logging.FileHandler(noticed))
    train_after(read_from_a_dead_disk, rank)


said = miniddp.run_ranks(be_stuck, 3, timeout=300).outputs[0]
named = re.search(r"the others wait for rank 1 \(in \S+:\d+ in read_from_a_dead_disk\)", said)
assert named, said
print(re.sub(r"\S+:\d+", "13-machines.py:…", named[0]))  # a notebook has other lines

# %% [markdown]
# ## What a failed rank leaves behind
#
# Logs of every rank in files, and the exception as JSON.

# %% name="logs"
logs = folder / "logs"
command = ["--standalone", f"--nproc_per_node={RANKS_PER_NODE}", "--log-dir", str(logs)]
command += ["--redirects", "3", str(here / "one_rank_fails.py")]
failed = subprocess.run(
    [sys.executable, "-m", "torch.distributed.run", *command],
    capture_output=True,
    text=True,
    timeout=300,
)
assert failed.returncode == 1
summary = failed.stderr[failed.stderr.index("Root Cause") :]
assert "rank      : 1" in summary
assert "row 4711" in summary
for line in summary.splitlines():
    if re.match(r"Root|\[0\]|  (rank|exitcode|error_file)|  ValueError", line):
        line = re.sub(r" \(pid: \d+\)", "", line)
        print(narrow(re.sub(r"\S+/(?=attempt)", "", line)))
print()
files = sorted(path for path in logs.rglob("*") if path.is_file())
for path in files:
    print(Path(*path.parts[-3:]), f"({path.stat().st_size} bytes)")
errors = [json.loads(path.read_text()) for path in files if path.parts[-2:] == ("1", "error.json")]
print()
print(narrow(f"rank 1, error.json: {errors[0]['message']['message']}"))
destroy_process_group()
