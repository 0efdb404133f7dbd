# %% [markdown]
# # Many machines, and failure
#
# Two launchers on one computer stand for two machines: they train on real sentence pairs, go on
# from a checkpoint after a rank has been killed, and then without one of the machines. Then ranks
# fail in every way that leaves others waiting, with a short timeout, to see what each of them says.

# %% name="setup"
import json
import logging
import os
import re
import shutil
import signal
import tempfile
import textwrap
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.ticker import MaxNLocator
from torch import Tensor

import ways_to_fail
from book import FOREGROUND, RANK_COLORS, data_dir, figure, provenance, record, show_ranks, table
from finetune import checkpoint
from finetune.options import parse_options
from finetune.state_file import read_state
from finetune.train import train
from instruments.failures import failure_of
from instruments.launchers import in_short, output_of
from instruments.programs import TORCHRUN, free_port, start_python
from instruments.restarts import lost_share, save_interval
from instruments.witnesses import TIMEOUT, Work, gist, witnesses_of
from miniddp import run_ranks
from miniddp.process import device

provenance(device=device(), world_size=[2, 3, 4], backend="gloo")
folder = Path(tempfile.mkdtemp(prefix="miniddp-"))


def first_pairs(source: Path, count: int) -> None:
    """Copy the first pairs of each MRPC file, so that the evaluation is short."""
    for path in source.glob("msr_paraphrase_*.txt"):
        lines = path.read_text(encoding="utf-8").splitlines()[: count + 1]
        (folder / path.name).write_text("\n".join(lines) + "\n", encoding="utf-8")


STEPS = 20
options = ["--model", "tiny", "--batch-size", "4", "--steps", str(STEPS)]
if source := data_dir():
    first_pairs(source, 384)
    options += ["--data-dir", str(folder)]


def narrow(text: str) -> str:
    """Lines that fit a phone."""
    lines = text.splitlines()
    return "\n".join(textwrap.fill(line, 36, subsequent_indent="  ") for line in lines)


# %% [markdown]
# ## A rank dies, and training goes on
#
# The machines meet by a rendezvous, so neither has a fixed number. After step 13 rank 1 is killed,
# once. Every fifth step is saved. A launcher names one failure: that of rank 0, which follows, if
# it was too busy to look in between. Then the run tries again.

# %% name="accident" ranks="4"
EVERY = 5
NEW_STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def saving_into(place: Path) -> list[str]:
    saving = ["--checkpoint", str(place), "--checkpoint-every", str(EVERY), "--resume", "auto"]
    return [*options, *saving]


def meeting(nodes: str) -> list[str]:
    """torchrun, for machines of two ranks that have no fixed numbers."""
    place = ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{free_port()}", "--rdzv_id=mrpc"]
    return [*TORCHRUN, f"--nnodes={nodes}", "--nproc_per_node=2", *place, "--max_restarts=3"]


def show(machine: int, output: str) -> None:
    print(f"on machine {machine}:")
    shown = in_short(output.replace(f"{folder}/", ""))
    print(textwrap.indent(shown, "  "))


disturbed = folder / "disturbed"
for _ in range(5):
    shutil.rmtree(disturbed, ignore_errors=True)
    disturbed.mkdir()
    command = [*meeting("2"), "runs/accident.py", *saving_into(disturbed)]
    launchers = [start_python(*command, **NEW_STORES) for _ in range(2)]
    outputs = [output_of(launcher) for launcher in launchers]
    both = "\n".join(outputs)
    assert "resumed after step 10" in both
    if "exitcode: -9" in both:
        break
assert "exitcode: -9" in both, "no launcher has seen the signal"
for machine, output in enumerate(outputs):
    show(machine, output)

# %% name="accident-loss" ranks="4"
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


def train_undisturbed(rank: int, place: str) -> None:
    logging.disable()
    train(parse_options([*options, "--checkpoint", place]))


def weights_in(place: Path) -> dict[str, Tensor]:
    state, _ = read_state(place / f"step-{STEPS:08d}.safetensors")
    return state["shared"]["model"]


run_ranks(train_undisturbed, 4, str(folder / "undisturbed"), timeout=300)
expected = weights_in(folder / "undisturbed")
weights = weights_in(disturbed)
assert weights.keys() == expected.keys()
assert all(torch.equal(weights[name], expected[name]) for name in expected)

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

# %% name="accident-values" ranks="4"
record(
    accident_step=13,
    resumed_step=10,
    lost_steps=len(repeated),
    every=EVERY,
    compared_tensors=len(weights),
)

# %% [markdown]
# ## A machine goes away
#
# When the checkpoint of step 10 is there, the second launcher is killed, and its ranks with it. The
# first one goes on alone.

# %% name="elastic" ranks="2 4"
shrunk = folder / "shrunk"
torchrun = meeting("1:2")
program = ["-m", "finetune", *saving_into(shrunk), "--elastic"]
stays = start_python(*torchrun, "--rdzv_conf=is_host=1", *program, **NEW_STORES)
goes = start_python(*torchrun, "--rdzv_conf=is_host=0", *program, **NEW_STORES)
deadline = time.monotonic() + 200
while not (shrunk / "step-00000010.safetensors").exists() and time.monotonic() < deadline:
    time.sleep(0.01)
goes.kill()
lost = time.time()
goes.communicate()
output = output_of(stays)
assert "saved on 4 ranks, now there are 2: new random numbers" in output
assert "on 2 ranks" in output
show(0, output)
seconds = (shrunk / "step-00000015.safetensors").stat().st_mtime - lost
print(f"from the loss of machine 1 until step 15 was saved: {seconds:.0f} s")

# %% [markdown]
# ## How often to save
#
# The interval that loses least: the square root of twice the time to save times the mean time
# between failures. One machine is assumed to fail every 100 days; a checkpoint takes 30 seconds.

# %% name="interval" badge="computed"
SAVE_SECONDS = 30
MACHINE_DAYS = 100
rows = []
for machines in (1, 8, 64, 512):
    between_failures = MACHINE_DAYS * 86_400 / machines
    interval = save_interval(SAVE_SECONDS, between_failures)
    share = lost_share(interval, SAVE_SECONDS, between_failures)
    hours = f"{between_failures / 3600:,.0f} h"
    rows.append([machines, hours, f"{interval / 60:.0f} min", f"{100 * share:.1f} %"])
table(rows, ["machines", "time between failures", "save every", "time lost"], align="rrrr")
record(save_seconds=SAVE_SECONDS, machine_days=MACHINE_DAYS)

# %% [markdown]
# ## A checkpoint that is killed while it is written
#
# A process is killed when half of the new checkpoint is on the disk: once where the file is
# overwritten in place, once with `save` of `finetune`.


# %% name="crash-while-saving" ranks="1"
def killed_while_overwriting(rank: int, path: Path) -> None:
    torch.save({"weight": torch.zeros(100_000)}, path.with_suffix(".new"))
    new = path.with_suffix(".new").read_bytes()
    with path.open("wb") as file:
        file.write(new[: len(new) // 2])
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def killed_while_saving(rank: int, place: Path) -> None:
    os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    checkpoint.save(place, 2, {"model": torch.nn.Linear(300, 300)})


def save_first(rank: int, place: Path) -> None:
    checkpoint.save(place, 1, {"model": torch.nn.Linear(300, 300)})


def find_latest(rank: int, place: Path) -> str:
    return checkpoint.latest(place).path.name


overwritten = folder / "model.pt"
torch.save({"weight": torch.ones(100_000)}, overwritten)
assert "SIGKILL" in failure_of(killed_while_overwriting, 1, overwritten).tracebacks[0]
try:
    torch.load(overwritten)
except Exception as error:
    text = f"overwritten in place: {type(error).__name__}: {str(error).partition('.')[0]}"
    print(narrow(text))
else:
    raise AssertionError("half a file was loaded")

place = folder / "atomic"
run_ranks(save_first, 1, place)
assert "SIGKILL" in failure_of(killed_while_saving, 1, place).tracebacks[0]
left = sorted(re.sub(r"\.\w+(?=\.unf)", ".…", path.name) for path in place.iterdir())
print("finetune's save left:", *left, sep="\n  ")
newest = run_ranks(find_latest, 1, place)[0]
assert newest == "step-00000001.safetensors"
print("the newest whole checkpoint:", newest, sep="\n  ")

# %% [markdown]
# ## Ways to wait for ever
#
# Three ranks, a timeout of two seconds, and rank 1 does something else (`runs/ways_to_fail.py`).
# Each rank says what it saw.


# %% name="ways" ranks="3"
def try_three(work: Work, title: str | None = None) -> list[str]:
    """Shows what each rank says; returns it in a line each."""
    said = witnesses_of(work)
    show_ranks([text or "(no error)" for text in said], title)
    return [" ".join(text.split()) for text in said]


WAYS = {
    "dies": (ways_to_fail.one_dies, "a rank dies"),
    "skips": (ways_to_fail.one_skips, "a rank skips a collective, and is busy"),
    "unequal": (ways_to_fail.uneven_batches, "a rank has fewer batches"),
    "other_collective": (ways_to_fail.another_collective, "a rank calls another collective"),
    "shapes": (ways_to_fail.another_shape, "a rank has another shape"),
    "memory": (ways_to_fail.uneven_lengths, "a rank runs out of memory"),
}
said = {way: try_three(work, title) for way, (work, title) in WAYS.items()}
for way in ("dies", "unequal", "memory"):
    assert all("peer" in said[way][rank] for rank in (0, 2)), way
assert "SIGKILL" in said["dies"][1]
assert all("Timed out" in said["skips"][rank] for rank in (0, 2))
assert not said["skips"][1]
assert "step 1 done" in said["unequal"][1]
assert "step 2 done" not in "".join(said["unequal"])
assert any("Timed out" in text for text in said["other_collective"])
assert all("Error" in text for text in said["other_collective"])
assert "result" in said["shapes"][0]
assert "[3.0, 3.0, 3.0, 3.0]" not in "".join(said["shapes"])
assert "own error" in said["memory"][1]
assert "llocat" in said["memory"][1]

# %% name="gists" ranks="3"
record(timeout=TIMEOUT)
for way, (before, own, after) in said.items():
    others = sorted({gist(before), gist(after)})
    record(**{f"{way}_own": gist(own), f"{way}_others": " or ".join(others)})

# %% [markdown]
# The same collectives in another order. The sums should be 3 and 30.

# %% name="other-order" ranks="3"
sums = try_three(ways_to_fail.another_order)
assert sums == ["ones: 12, tens: 21", "ones: 21, tens: 12", "ones: 12, tens: 21"]

# %% [markdown]
# With `TORCH_DISTRIBUTED_DEBUG=DETAIL` the ranks notice other collectives and shapes at once, and
# name a rank that is missing. Another order of equal shapes they do not notice.

# %% name="detail" ranks="3"
missing = witnesses_of(ways_to_fail.one_skips, detail=True)[0]
assert "Ranks 1 failed to pass monitoredBarrier" in " ".join(missing.split())
for text in witnesses_of(ways_to_fail.another_collective, detail=True):
    assert "Detected mismatch" in " ".join(text.split())
    assert "ALLREDUCE" in text
for text in witnesses_of(ways_to_fail.another_shape, detail=True):
    assert "Detected mismatch" in " ".join(text.split())
    assert "TensorShape=[5]" in text
unnoticed = witnesses_of(ways_to_fail.another_order, detail=True)
assert unnoticed == sums

# %% [markdown]
# ## Who is missing, who is slow?

# %% name="roll-call" ranks="3"
said = try_three(ways_to_fail.late_for_the_roll_call)
assert "Ranks 1 failed to pass monitoredBarrier" in said[0]

# %% [markdown]
# A training with `finetune` finds out by itself. Rank 1 sleeps in each step, then it is stuck in
# one.

# %% name="slow" ranks="3"
SLEEP = 0.5
said = run_ranks(ways_to_fail.sleep_in_each_step, 3, options, SLEEP, timeout=200).outputs
assert said[0].startswith("rank 1 is slow")
print(said[0].strip())
record(sleep_ms=round(1000 * SLEEP))

# %% name="stuck" ranks="3"
stuck = ways_to_fail.stuck_until_noticed
said = run_ranks(stuck, 3, options, folder / "noticed", timeout=300).outputs[0]
named = re.search(r"the others wait for rank 1 \(in \S+:\d+ in read_from_a_dead_disk\)", said)
assert named, said
print(named[0])

# %% [markdown]
# ## What a failed rank leaves behind
#
# Logs of every rank in files, and the exception as JSON.

# %% name="logs" ranks="2"
logs = folder / "logs"
command = ["--standalone", "--nproc_per_node=2", "--log-dir", str(logs), "--redirects", "3"]
launcher = start_python(*TORCHRUN, *command, "runs/one_rank_fails.py")
_, errors = launcher.communicate(timeout=300)
assert launcher.returncode == 1
summary = errors[errors.index("Root Cause") :]
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
[of_rank_1] = [path for path in files if path.parts[-2:] == ("1", "error.json")]
message = json.loads(of_rank_1.read_text())["message"]["message"]
print()
print(narrow(f"rank 1, error.json: {message}"))
