# %% [markdown]
# # The whole script
#
# Two ranks train the language model with `stages/9_train.py`: beside one process, to the end,
# killed and resumed, resumed without a part of the checkpoint, and with a checkpoint that one rank
# saves alone. Then `finetune` classifies sentence pairs.

# %% name="setup"
import itertools
import os
import re
import runpy
import shutil
import statistics
import sys
import tempfile
import textwrap
from collections.abc import Callable
from datetime import timedelta
from functools import partial
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
from miniddp.process import device, init_process_group
from shakespeare import VOCAB_SIZE, load_text

STEPS = 40
EVERY = 10  # steps from checkpoint to checkpoint
DEATH = 25  # the step in which rank 1 dies
provenance(device=device(), world_size=[1, 2], backend="gloo")
folder = data_dir()
os.environ["STEPS"] = str(STEPS)


def load(stage: str) -> dict[str, Any]:
    """The globals of a stage, its `main` among them."""
    return runpy.run_path(f"stages/{stage}.py")["main"].__globals__


def without_speed(text: str) -> str:
    """What a stage prints, but for what differs from machine to machine."""
    return "\n".join(line for line in text.splitlines() if "tokens a second" not in line)


# %% [markdown]
# ## What a crash costs in stage 8


# %% name="lost" ranks="2"
def train_until_death(rank: int, stage: str, *options: str) -> None:
    """Rank 1 dies in step `DEATH`, after the optimizer has changed the weights."""
    steps = itertools.count(1)
    if rank == 1:
        register_optimizer_step_post_hook(lambda *_: os._exit(9) if next(steps) == DEATH else None)
    sys.argv = [stage, *options]
    load(stage)["main"]()


def show_death(stage: str, place: Path, *options: str) -> None:
    failure = failure_of(train_until_death, 2, stage, *options, backend=None)
    print(failure.outputs[0], end="")
    print("rank 1:", failure.tracebacks[1].partition(";")[0])
    files = sorted(path.name for path in place.iterdir())
    print("on the disk:", ", ".join(files) or "nothing")


home = Path(tempfile.mkdtemp())
show_death("8_accumulation", home)
assert not list(home.iterdir())

# %% [markdown]
# ## Which lines of stage 9 know of other ranks

# %% name="rank-lines" badge="computed"
KNOWS = re.compile(
    r"dist\.|Distributed|ddp|no_sync|set_epoch|shard\(|global_mean|_process_group|replicas\("
)
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
def resume_without(
    part: str, resume: Callable[..., int], place: str, objects: dict[str, Any]
) -> int:
    """A resume after which one part is still as at the beginning of a training."""
    beginning = torch.get_rng_state()
    step = resume(place, {name: found for name, found in objects.items() if name != part})
    if part == "random states":
        torch.set_rng_state(beginning)
    return step


def train(rank: int, forgotten: str, *options: str) -> list[float]:
    """With stage 9; this rank's losses of all steps."""
    script = load("9_train")
    script["resume"] = partial(resume_without, forgotten, script["resume"])
    train_step = script["train_step"]
    losses = []

    def train_step_and_note(*arguments: Any) -> torch.Tensor:
        losses.append(train_step(*arguments))
        return losses[-1]

    script["train_step"] = train_step_and_note
    sys.argv = ["9_train.py", *options]
    script["main"]()
    return torch.stack(losses).tolist()


def train_on(ranks: int, place: Path, forgotten: str = "nothing") -> tuple[list[float], str]:
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
axes.set(xlabel="step", ylabel="mean loss of the joined batch")
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
# Two ranks, all 183 steps: three times through the text. The recording leaves out the speed.


# %% name="learned" ranks="2"
def train_to_the_end(rank: int) -> None:
    sys.argv = ["9_train.py", "--steps", "183"]
    load("9_train")["main"]()


text = run_ranks(train_to_the_end, 2, backend=None, timeout=900).outputs[0]
print(without_speed(text))

train_text, test_text = (sequences[:, 1:].flatten() for sequences in load_text())
most_frequent = train_text.bincount().argmax()
right = float(re.search(r"right in (\S+)%", text).group(1))
found_by_one = 100 * (test_text == most_frequent).double().mean().item()
assert right > 1.5 * found_by_one
record(right=right, most_frequent=found_by_one, vocabulary=VOCAB_SIZE)

# %% [markdown]
# ## Killed and resumed
#
# The training on two ranks again, with a checkpoint every 10 steps. Rank 1 dies in step 25. The
# same command goes on from step 20.

# %% name="killed" ranks="2"
broken = home / "broken"
show_death("9_train", broken, "--checkpoints", str(broken), "--every", str(EVERY))
died = shutil.copytree(broken, home / "died")
assert [path.stem[-2:] for path in sorted(died.iterdir())] == ["10", "20"]

# %% name="resumed" ranks="2"
resumed, text = train_on(2, broken)
first = STEPS - len(resumed)
print(without_speed(text))
assert first == DEATH // EVERY * EVERY
assert resumed == two[first:], "the same losses, bit for bit"
file = f"step-{STEPS:08d}"
of_undisturbed = digest_of(torch.load(home / "undisturbed" / f"{file}.pt"))
of_broken = digest_of(torch.load(broken / f"{file}.pt"))
assert of_undisturbed == of_broken
print()
print(f"{file} of the undisturbed training: {of_undisturbed[:16]}…")
print(f"{file} of the broken training:      {of_broken[:16]}…")
record(every=EVERY, death=DEATH, first_step=first, lost=DEATH - first)

# %% [markdown]
# ## Resumed without a part of the checkpoint
#
# From step 20 again, four times. Each time one part is not restored.

# %% name="forgotten" ranks="2"
changes = {}
for part in ("optimizer", "batches", "scheduler", "random states"):
    shutil.copytree(died, home / part)
    losses, _ = train_on(2, home / part, forgotten=part)
    changes[part] = [now - then for now, then in zip(losses, resumed, strict=True)]
assert min(changes["optimizer"]) > -0.01, "worse, or equal as in the first step"
assert max(changes["optimizer"]) > 0.05
assert any(changes["batches"])
assert not any(changes["scheduler"] + changes["random states"]), "no warm-up, no dropout"

fig, axes = plt.subplots()
steps = range(first + 1, STEPS + 1)
axes.plot(steps, changes["random states"], color=FOREGROUND, label="schedule; random states")
axes.plot(steps, changes["optimizer"], "o-", color=RANK_COLORS[0], label="optimizer")
axes.plot(steps, changes["batches"], "s--", color=RANK_COLORS[1], label="place in the data")
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
    save = script["save"]

    def save_on_rank_0(*arguments: Any) -> None:
        if dist.get_rank() == 0:
            save(*arguments)

    script["save"] = save_on_rank_0
    script["init_process_group"] = partial(init_process_group, timeout=timedelta(seconds=5))
    sys.argv = ["9_train.py", "--checkpoints", place, "--every", "2", "--steps", "4"]
    script["main"]()


def place_of(traceback: str) -> str:
    """The functions of the book's code in which a rank was, and its error."""
    frames = re.findall(r'(?:stages|miniddp)/(?:\w+/)?(\w+\.py)", line \d+, in (\w+)', traceback)
    lines = [f"{file}: {name}" for file, name in frames]
    error = traceback.strip().splitlines()[-1].rpartition("] ")[2]
    return "\n".join([*lines, f"RuntimeError: {error}"])


failure = failure_of(train_and_save_alone, 2, str(home / "alone"), backend=None)
places = [place_of(failure.tracebacks[rank]) for rank in range(2)]
assert "9_train.py: save" in places[0], "rank 0 waits for the random state of rank 1"
assert "wrapper.py: forward" in places[1], "rank 1 waits for the next step of rank 0"
show_ranks(places)
assert not list((home / "alone").glob("*")), "nothing was saved"

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
