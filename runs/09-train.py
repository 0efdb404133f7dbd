# %% [markdown]
# # The whole script
#
# Two ranks train the language model with `stages/9_train.py`: beside one process, to the end,
# killed and resumed, told to leave, resumed without a part of the checkpoint, and with a
# checkpoint that one rank saves alone. Then `finetune` classifies sentence pairs.

# %% name="setup"
import itertools
import os
import re
import runpy
import shutil
import signal
import statistics
import sys
import tempfile
import textwrap
from datetime import timedelta
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from matplotlib.ticker import MaxNLocator
from torch.optim.optimizer import register_optimizer_step_post_hook

from book import FOREGROUND, RANK_COLORS, data_dir, figure, provenance, record, show_ranks
from finetune.data import load_mrpc
from instruments.digests import digest_of
from instruments.failures import failure_of
from instruments.programs import TORCHRUN, start_python
from miniddp import run_ranks
from miniddp.process import device
from shakespeare import VOCAB_SIZE, load_text

STEPS = 40
EVERY = 20  # steps from checkpoint to checkpoint
DEATH = 25  # the step in which something happens to rank 1
provenance(device=device(), world_size=[1, 2], backend="gloo")
folder = data_dir()
os.environ["STEPS"] = str(STEPS)


def load(stage: str) -> dict[str, Any]:
    """The globals of a stage, its `main` among them."""
    return runpy.run_path(f"stages/{stage}.py")["main"].__globals__


# %% [markdown]
# ## What a crash costs in stage 8


# %% name="lost" ranks="2"
def train_until_death(rank: int, stage: str, *options: str) -> None:
    """Rank 1 dies in step `DEATH`, after the optimizer has changed the weights."""
    train_and_send(rank, signal.SIGKILL, stage, *options)


def train_and_send(rank: int, number: int, stage: str, *options: str) -> None:
    """Rank 1 gets a signal in step `DEATH`."""
    steps = itertools.count(1)

    def send(*_: Any) -> None:
        if next(steps) == DEATH:
            os.kill(os.getpid(), number)

    if rank == 1:
        register_optimizer_step_post_hook(send)
    sys.argv = [stage, *options]
    load(stage)["main"]()


def files_in(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


def show_death(stage: str, place: Path, *options: str) -> None:
    failure = failure_of(train_until_death, 2, stage, *options, backend=None)
    print(failure.outputs[0], end="")
    print("rank 1:", failure.tracebacks[1].partition(";")[0])
    print("on the disk:", ", ".join(files_in(place)) or "nothing")


home = Path(tempfile.mkdtemp())
show_death("8_accumulation", home)
assert not list(home.iterdir())

# %% [markdown]
# ## Which lines of stage 9 know of other ranks

# %% name="rank-lines" badge="computed"
KNOWS = re.compile(r"dist\.|Distributed|wrap\(|no_sync|set_epoch|together\(|alike\(|own_seed")
program = Path("stages/9_train.py").read_text()
count = 0
for part in re.split(r"\n(?:def|class) ", program)[1:]:
    name, *body = part.splitlines()
    lines = [line.strip() for line in body if KNOWS.search(line)]
    count += len(lines)
    if lines:
        print(re.match(r"\w+", name)[0], end=":\n    ")
        print("\n    ".join(lines))
record(rank_lines=count, all_lines=len(program.splitlines()))

# %% [markdown]
# ## The same loss curve


# %% name="loss-curve" ranks="1 2"
def forget(script: dict[str, Any], part: str) -> None:
    """From now on a resume leaves one part as it is at the beginning of a training."""
    if part == "place":
        micro_batches = script["micro_batches"]
        script["micro_batches"] = lambda loader, options, _: micro_batches(loader, options, 0)
        return
    load_all = script["load"]

    def load_others(path: Path, objects: dict[str, Any], options: Any) -> int:
        others = {name: found for name, found in objects.items() if name != part}
        return load_all(path, others, options)

    script["load"] = load_others


def train(rank: int, forgotten: str, *options: str) -> list[float]:
    """With stage 9; this rank's losses of all steps."""
    script = load("9_train")
    if forgotten:
        forget(script, forgotten)
    train_step = script["train_step"]
    losses = []

    def train_step_and_note(*arguments: Any) -> torch.Tensor:
        losses.append(train_step(*arguments))
        return losses[-1]

    script["train_step"] = train_step_and_note
    sys.argv = ["9_train.py", *options]
    script["main"]()
    return torch.stack(losses).tolist()


def train_on(ranks: int, place: Path, forgotten: str = "") -> tuple[list[float], str]:
    """The mean losses, and what rank 0 printed."""
    options = [forgotten, "--checkpoints", str(place), "--every", str(EVERY)]
    results = run_ranks(train, ranks, *options, backend=None, timeout=900)
    means = [statistics.mean(losses) for losses in zip(*results, strict=True)]
    return means, results.outputs[0]


one, _ = train_on(1, home / "one")
two, _ = train_on(2, home / "undisturbed")
differences = [abs(a - b) for a, b in zip(one, two, strict=True)]
assert max(differences[:10]) < 1e-3, "the first steps differ by rounding only"
assert max(differences) < 0.05
assert two[-1] < two[0] - 1

fig, axes = plt.subplots()
counted = range(1, STEPS + 1)
axes.plot(counted, one, label="1 process, batches of 36", linewidth=5, alpha=0.45)
axes.plot(counted, two, label="2 ranks, batches of 18", linewidth=1.5)
axes.set(xlabel="step", ylabel="mean loss of the global batch")
fig.legend(loc="outside upper left")
figure(fig)

# %% name="loss-values" ranks="1 2"
record(
    steps=STEPS,
    largest_difference_first_ten=max(differences[:10]),
    largest_difference=max(differences),
)

# %% [markdown]
# ## What it learns
#
# Two ranks, all 183 steps: three times through the text.


# %% name="learned" ranks="2"
def train_to_the_end(rank: int) -> None:
    sys.argv = ["9_train.py", "--steps", "183"]
    load("9_train")["main"]()


text = run_ranks(train_to_the_end, 2, backend=None, timeout=900).outputs[0]
print("\n".join(line for line in text.splitlines() if "held-out" in line))

train_tokens, test_tokens = (sequences[:, 1:].flatten() for sequences in load_text())
counts = train_tokens.bincount(minlength=VOCAB_SIZE) + 1
frequencies = counts / counts.sum()
by_frequency = -frequencies[test_tokens].log().mean().item()
learned = float(re.findall(r"held-out loss (\S+)", text)[-1])
assert learned < by_frequency - 1
record(learned=learned, by_frequency=by_frequency, vocabulary=VOCAB_SIZE)

# %% [markdown]
# ## Killed and resumed
#
# The training on two ranks again, with a checkpoint every 20 steps. Rank 1 dies in step 25. The
# same command goes on from step 20.

# %% name="killed" ranks="2"
broken = home / "broken"
show_death("9_train", broken, "--checkpoints", str(broken), "--every", str(EVERY))
died = shutil.copytree(broken, home / "died")
assert [name[:13] for name in files_in(died)] == ["step-00000020"]

# %% name="resumed" ranks="2"
resumed, text = train_on(2, broken)
first = STEPS - len(resumed)
print(text)
assert first == DEATH // EVERY * EVERY
assert resumed == two[first:], "the same losses, bit for bit"


def digest_of_last(place: Path) -> str:
    return digest_of(torch.load(place / files_in(place)[-1]))


of_undisturbed = digest_of_last(home / "undisturbed")
of_broken = digest_of_last(broken)
assert of_undisturbed == of_broken
print(f"weights and all, undisturbed: {of_undisturbed[:16]}…")
print(f"killed and resumed:           {of_broken[:16]}…")
record(every=EVERY, death=DEATH, first_step=first, lost=DEATH - first)

# %% [markdown]
# ## Told to leave
#
# Rank 1 gets SIGTERM in step 25, as from a scheduler that wants its machine back. Then the same
# command again.

# %% name="told" ranks="2"
told = home / "told"
with_folder = ["--checkpoints", str(told), "--every", str(EVERY)]
text = run_ranks(
    train_and_send, 2, signal.SIGTERM, "9_train", *with_folder, backend=None, timeout=900
).outputs[0]
print(text, end="")
names = files_in(told)
print("on the disk:", ", ".join(names))
assert [name[:13] for name in names] == ["step-00000020", "step-00000030"]
after_leaving, _ = train_on(2, told)
assert after_leaving == two[30:], "nothing is lost"
assert digest_of_last(told) == of_undisturbed
record(left_after=STEPS - len(after_leaving))

# %% [markdown]
# ## Resumed without a part of the checkpoint
#
# From step 20 again, three times. Each time one part is not restored.

# %% name="forgotten" ranks="2"
changes = {}
for part in ("optimizer", "place", "scheduler"):
    shutil.copytree(died, home / part)
    losses, _ = train_on(2, home / part, forgotten=part)
    changes[part] = [now - then for now, then in zip(losses, resumed, strict=True)]
assert min(changes["optimizer"]) > -0.01, "worse, or equal as in the first step"
assert max(changes["optimizer"]) > 0.05
assert any(changes["place"])
assert not any(changes["scheduler"]), "no warm-up"

fig, axes = plt.subplots()
steps = range(first + 1, STEPS + 1)
axes.plot(steps, changes["scheduler"], color=FOREGROUND, label="schedule")
axes.plot(steps, changes["optimizer"], "o-", color=RANK_COLORS[0], label="optimizer")
axes.plot(steps, changes["place"], "s--", color=RANK_COLORS[1], label="place in the data")
axes.set(xlabel="step", ylabel="loss − undisturbed loss")
axes.xaxis.set_major_locator(MaxNLocator(integer=True))
fig.legend(loc="outside upper left", title="not restored:")
figure(fig)

# %% name="forgotten-values" ranks="2"
record(without_optimizer=max(changes["optimizer"]))

# %% [markdown]
# ## A checkpoint that rank 0 saves alone


# %% name="saved-alone" ranks="2"
def train_and_save_alone(rank: int, place: str) -> None:
    script = load("9_train")
    together = script["together"]

    def save_on_rank_0(work: Any, *arguments: Any) -> Any:
        if work is script["save"] and dist.get_rank() != 0:
            return None
        return together(work, *arguments)

    def start() -> torch.device:
        dist.init_process_group("gloo", timeout=timedelta(seconds=5))
        return torch.device("cpu")

    script["together"] = save_on_rank_0
    script["start"] = start
    sys.argv = ["9_train.py", "--checkpoints", place, "--every", "2", "--steps", "4"]
    script["main"]()


def place_of(traceback: str) -> str:
    """The functions in which a rank was, of the script and of DDP, and its error."""
    files = r"(9_train|parallel/distributed)\.py"
    found = re.findall(rf'{files}", line \d+, in ([a-z]\w+)', traceback)
    lines = [f"{file}.py: {name}" for file, name in found]
    error = traceback.strip().splitlines()[-1].rpartition("] ")[2]
    return "\n".join([*lines, f"RuntimeError: {error}"])


failure = failure_of(train_and_save_alone, 2, str(home / "alone"), backend=None)
places = [place_of(failure.tracebacks[rank]) for rank in range(2)]
show_ranks(places)
assert "9_train.py: together" in places[0], "rank 0 waits for rank 1, which does not save"
assert "parallel/distributed.py: forward" in places[1], "rank 1 is in its next step"

# %% [markdown]
# ## The package's command
#
# The recording leaves out the progress bar and the speed, which says little on two busy cores.

# %% name="launch" ranks="2"
arguments = "--standalone --nproc_per_node=2 -m finetune --model tiny --steps 20"
with_data = ["--data-dir", str(folder)] if folder else []
print(f"$ torchrun {arguments}" + (" \\\n    --data-dir path/to/mrpc" if folder else ""))
launcher = start_python(*TORCHRUN, *arguments.split(), *with_data)
_, errors = launcher.communicate(timeout=300)
assert launcher.returncode == 0, errors
log = [line for line in errors.splitlines() if line.strip() and "step/s" not in line]
for line in log:
    if not line.startswith("speed:"):
        shown = line.replace(str(folder), "path/to/mrpc")
        print(textwrap.fill(shown, 78, subsequent_indent="  "))
assert sum(line.startswith("evaluation:") for line in log) == 1, "only rank 0 logs"

# %% name="majority"
labels = load_mrpc(folder, "test")["label"]
print(f"{sum(labels)} of {len(labels)} test pairs have label 1")
record(majority=sum(labels) / len(labels))
