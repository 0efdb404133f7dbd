# %% [markdown]
# # One process and two ranks
#
# The same training, twice: one process with batches of 16 pairs, and two ranks with 8 pairs each.
# Both see the same joined batches. The loss curves must be the same up to rounding, and the
# throughput is measured with the communication inside. Then the script is launched as a user would,
# its wrappers take turns, and a training is killed and resumed.

# %% name="setup"
import functools
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist

import miniddp.training_step
from book import data_dir, figure, provenance, record, table
from instruments.clock import SyncClock, clock
from miniddp import SimpleDDP
from miniddp.data import batches, build_loader, load_data
from miniddp.launch import RanksFailed
from miniddp.model import load_model
from miniddp.process import device
from miniddp.state_file import read_state
from miniddp.train import Options, Result, train
from miniddp.training_step import WRAPPERS, build_optimizer, train_step

WORLD_SIZES = [1, 2]
JOINED_BATCH = 16
STEPS = 100
provenance(device=device(), world_size=WORLD_SIZES, backend="gloo")
folder = data_dir()


# %% name="train"
def run(rank: int, options: Options) -> Result:
    logging.disable()
    return train(options)


results = {}
for world_size in WORLD_SIZES:
    options = Options(
        data_dir=folder and str(folder),
        model="tiny",
        pretrained=False,
        steps=STEPS,
        batch_size=JOINED_BATCH // world_size,
    )
    results[world_size] = miniddp.run_ranks(run, world_size, options, timeout=600)[0]
one, two = results[1], results[2]
print(f"one process: loss {one.losses[0]:.4f} at first, {one.losses[-1]:.4f} at step {STEPS}")
print(f"two ranks:   loss {two.losses[0]:.4f} at first, {two.losses[-1]:.4f} at step {STEPS}")

# %% [markdown]
# ## The same loss curve

# %% name="loss-curve"
differences = [abs(a - b) for a, b in zip(one.losses, two.losses, strict=True)]
assert max(differences[:10]) < 1e-3, "the first steps differ by rounding only"
assert max(differences) < 0.05

fig, axes = plt.subplots()
axes.plot(one.losses, label=f"1 process, batches of {JOINED_BATCH}", linewidth=4, alpha=0.45)
axes.plot(two.losses, label=f"2 ranks, batches of {JOINED_BATCH // 2}", linewidth=1.5)
axes.set(xlabel="step", ylabel="mean loss of the joined batch")
fig.legend(loc="outside upper left")
figure(fig)

# %% name="loss-values"
record(
    steps=STEPS,
    joined_batch=JOINED_BATCH,
    largest_difference_first_ten=max(differences[:10]),
    largest_difference=max(differences),
)

# %% [markdown]
# ## Throughput, with the communication in it

# %% name="throughput"
table(
    [
        [
            f"{ranks} {'process' if ranks == 1 else 'ranks'}",
            JOINED_BATCH // ranks,
            f"{result.samples_per_second:.1f}",
            f"{result.accuracy:.3f}",
        ]
        for ranks, result in results.items()
    ],
    ["run", "pairs per rank", "pairs per second", "test accuracy"],
    "lrrr",
)

# %% name="throughput-values"
record(
    samples_per_second_1=one.samples_per_second,
    samples_per_second_2=two.samples_per_second,
    speedup=two.samples_per_second / one.samples_per_second,
)

# %% [markdown]
# ## A benchmark that measures no communication
#
# The same loop twice: as it is, and with the synchronisation switched off. The ranks of the second
# one train apart.


# %% name="never-synchronises"
ROUNDS = 5
STEPS_OF_A_ROUND = 8


def loop(rank: int, options: Options) -> dict[bool, tuple[float, float]]:
    """Median seconds per step and the largest difference between the ranks' weights."""
    miniddp.set_seed(0)
    data, _, tokenizer, _ = load_data(options)
    todo = list(batches(build_loader(data, tokenizer, options), options))
    times: dict[bool, list[float]] = {True: [], False: []}
    models = {}
    for synchronised in times:
        miniddp.set_seed(0)
        model = SimpleDDP(load_model(options.model, pretrained=False).to(device()))
        models[synchronised] = model, torch.optim.AdamW(model.parameters(), lr=1e-3)
        if not synchronised:
            model.disable_grad_sync()  # train_step calls sync_gradients, which does nothing
        train_step(*models[synchronised], todo[0])
    for first in range(ROUNDS):
        for synchronised, (model, optimizer) in models.items():
            dist.barrier()
            start = clock()
            for batch in todo[first * STEPS_OF_A_ROUND :][:STEPS_OF_A_ROUND]:
                train_step(model, optimizer, batch)
            times[synchronised].append((clock() - start) / STEPS_OF_A_ROUND)
    return {
        synchronised: (statistics.median(times[synchronised]), spread(model))
        for synchronised, (model, _) in models.items()
    }


def spread(model: torch.nn.Module) -> float:
    largest = 0.0
    for parameter in model.parameters():
        low, high = parameter.detach().clone(), parameter.detach().clone()
        dist.all_reduce(low, dist.ReduceOp.MIN)
        dist.all_reduce(high, dist.ReduceOp.MAX)
        largest = max(largest, (high - low).max().item())
    return largest


plain = Options(
    data_dir=folder and str(folder), model="tiny", pretrained=False, batch_size=JOINED_BATCH // 2
)
found = miniddp.run_ranks(loop, 2, plain, timeout=300)[0]
table(
    [
        [
            "with `sync_gradients()`" if synchronised else "without it",
            f"{1e3 * seconds:.1f}",
            f"{apart:.1g}",
        ]
        for synchronised, (seconds, apart) in found.items()
    ],
    ["2 ranks", "ms per step", "largest difference of a weight"],
)
assert found[True][1] == 0 < found[False][1]
record(
    missing_share=100 * (1 - found[False][0] / found[True][0]),
    apart=found[False][1],
    steps_apart=ROUNDS * STEPS_OF_A_ROUND + 1,
)

# %% [markdown]
# ## Three wrappers, one loop
#
# The script's `--ddp` chooses what averages the gradients. They take turns on the same batches.


# %% name="wrappers"
NAMES = ["simple", "miniddp", "torch"]


def compare(rank: int, options: Options) -> dict[str, tuple[float, float, float]]:
    """Median milliseconds of a step, median share of waiting, last loss; for each wrapper."""
    data, _, tokenizer, _ = load_data(options)
    todo = list(batches(build_loader(data, tokenizer, options), options))[:20]
    trained, waited = {}, {name: [] for name in NAMES}
    seconds, losses = {name: [] for name in NAMES}, {}
    for name in NAMES:
        miniddp.set_seed(0)
        module = load_model(options.model, pretrained=False).to(device())
        own = SyncClock(module)  # before the wrapper: it notes the rank's own last gradient
        optimizer, _ = build_optimizer(module, options)
        note = functools.partial(note_wait, own, waited[name])
        optimizer.register_step_pre_hook(note)
        trained[name] = WRAPPERS[name](module), optimizer
    for micro_batches in todo:
        for name, (model, optimizer) in trained.items():
            dist.barrier()
            start = clock()
            losses[name] = train_step(model, optimizer, micro_batches)
            seconds[name].append(clock() - start)
    return {
        name: (
            statistics.median(1e3 * s for s in seconds[name][2:]),
            statistics.median(
                100 * w / s for w, s in zip(waited[name][2:], seconds[name][2:], strict=True)
            ),
            losses[name].item(),
        )
        for name in NAMES
    }


def note_wait(own: SyncClock, waited: list[float], *_: object) -> None:
    """The optimizer is about to step, so the gradients are averaged: how long did that take?"""
    waited.append(own.seconds())


compared = miniddp.run_ranks(compare, 2, replace(plain, model="5m"), timeout=300)[0]
table(
    [
        [name, f"{milliseconds:.1f}", f"{share:.1f} %", f"{loss:.4f}"]
        for name, (milliseconds, share, loss) in compared.items()
    ],
    ["`--ddp`", "ms per step", "share spent waiting for gradients", "loss of step 20"],
)
last_losses = [loss for _, _, loss in compared.values()]
assert max(last_losses) - min(last_losses) < 1e-3

# %% [markdown]
# ## As a user launches it
#
# `torchrun` starts two processes. Only rank 0 writes a log.

# %% name="launch"
command = "torchrun --standalone --nproc_per_node=2 -m miniddp.train --model tiny --steps 20"
arguments = command.split()[1:] + (["--data-dir", str(folder)] if folder else [])
print(f"$ {command}" + (" \\\n    --data-dir path/to/mrpc" if folder else ""))
launched = subprocess.run(
    [sys.executable, "-m", "torch.distributed.run", *arguments],
    env={**os.environ, "OMP_NUM_THREADS": "1"},
    capture_output=True,
    text=True,
    timeout=300,
)
assert launched.returncode == 0, launched.stderr
log = [line for line in launched.stderr.splitlines() if "step/s" not in line]
for line in log:
    if line.strip():
        shown = line.replace(str(folder), "path/to/mrpc")
        print(textwrap.fill(shown, 78, subsequent_indent="  "))
assert sum(line.startswith("evaluation:") for line in log) == 1, "only rank 0 logs"

# %% [markdown]
# ## Killed and resumed
#
# A training of 24 steps on two ranks saves a checkpoint every 8 steps. Another one is the same, but
# rank 1 dies in step 14. Started again with `--resume auto`, it goes on from step 8.


# %% name="killed"
LENGTH, EVERY, DEATH = 24, 8, 14


def train_quietly(rank: int, options: Options, dies_at: int | None = None) -> Result:
    logging.disable()
    if rank == 1 and dies_at:
        count = 0

        def die(*arguments, **options):
            nonlocal count
            count += 1
            if count == dies_at:
                os._exit(9)
            return train_step(*arguments, **options)

        miniddp.training_step.train_step = die
    return train(options)


place = Path(tempfile.mkdtemp())
straight = replace(
    plain,
    steps=LENGTH,
    accumulation=2,
    checkpoint=str(place / "straight"),
    checkpoint_every=EVERY,
)
unbroken = miniddp.run_ranks(train_quietly, 2, straight, timeout=300)[0]
broken = replace(straight, checkpoint=str(place / "broken"), resume="auto")
try:
    miniddp.run_ranks(train_quietly, 2, broken, DEATH, timeout=300)
except RanksFailed as error:
    print(error.tracebacks[1].partition(";")[0])
print("on the disk:", *sorted(path.name for path in (place / "broken").iterdir()))

# %% name="resumed"
resumed = miniddp.run_ranks(train_quietly, 2, broken, timeout=300)[0]
print(f"resumed after step {resumed.first_step}, took {len(resumed.losses)} steps")
assert resumed.first_step == EVERY
assert resumed.losses == unbroken.losses[EVERY:], "the same losses, bit for bit"
digests = [
    read_state(place / name / f"step-{LENGTH:08d}.safetensors")[1]
    for name in ("straight", "broken")
]
for name, digest in zip(("never stopped", "killed, resumed"), digests, strict=True):
    print(f"{name:16} step {LENGTH}: sha256 {digest[:16]}…")
assert digests[0] == digests[1]
record(
    length=LENGTH, every=EVERY, death=DEATH, lost=DEATH - 1 - EVERY, first_step=resumed.first_step
)

# %% name="truncated"
newest = place / "broken" / f"step-{LENGTH:08d}.safetensors"
newest.write_bytes(newest.read_bytes()[:-1000])
try:
    miniddp.run_ranks(train_quietly, 2, replace(straight, checkpoint=None, checkpoint_every=None,
                      resume=str(newest), steps=LENGTH + 4), timeout=300)  # fmt: skip
except RanksFailed as error:
    message = error.tracebacks[0].splitlines()[-1].partition(": ")[2]
    print(message.replace(str(place), "…"))
assert "broken" in message
