# %% [markdown]
# # Profile it
#
# Where does the time of a training step go? This run records steps of real training with
# `torch.profiler`, draws them, and asks what one trace tells about the other ranks.

# %% name="setup"
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch 2.13 prints a line per recording otherwise

import matplotlib.pyplot as plt
import torch
from torch import nn

import miniddp
import own_step
from book import RANK_COLORS, data_dir, figure, provenance, record, table
from finetune.data import encode, load_mrpc
from finetune.model import load_model, load_tokenizer
from instruments import lanes, unsynchronised
from instruments.backend import backend_of
from instruments.breakdown import Breakdown, break_down
from instruments.profiled_training import Loader, profiled_training
from instruments.profiling import Schedule
from instruments.trace import Event, Trace, read_trace
from miniddp.process import device

WORLD_SIZE = 2
BACKEND = backend_of(WORLD_SIZE)
on_gpu = device().type == "cuda"
SIZE = "25m" if on_gpu else "tiny"
PAIRS_PER_RANK = 32 if on_gpu else 16
provenance(device=device(), world_size=WORLD_SIZE, backend=BACKEND)
pairs = load_mrpc(data_dir())
rows = pairs[:]
tokenizer = load_tokenizer(rows["sentence1"] + rows["sentence2"], SIZE, pretrained=False)
encoded = encode(pairs.select(range(min(1024, len(pairs)))), tokenizer, max_length=128)

loader = Loader(encoded, tokenizer, WORLD_SIZE, PAIRS_PER_RANK)


def build() -> nn.Module:
    miniddp.set_seed(0)
    return load_model(SIZE, pretrained=False).to(device())


print(f"model {SIZE}, {PAIRS_PER_RANK} pairs per rank")

# %% [markdown]
# ## A training loop with a profiler
#
# Two ranks train 13 steps; the schedule of the book records the last five. Each rank writes a
# trace, and `instruments.breakdown` makes a table of it. A rank can be told to be slow: it then
# sleeps while it loads its batch.

# %% name="profiled-training"
folder = Path(tempfile.mkdtemp(prefix="traces-"))


def train(name: str, wrapper: str = "miniddp", load_seconds: tuple[float, float] = (0, 0)):
    """The traces of both ranks."""
    arguments = (folder / name, build, loader, wrapper, load_seconds)
    paths = miniddp.run_ranks(
        profiled_training, WORLD_SIZE, *arguments, backend=BACKEND, timeout=300
    )
    return [read_trace(path) for path in paths]


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


even = train("even")
step_of = [break_down(trace) for trace in even]
for breakdown in step_of:
    assert breakdown.steps == Schedule().active
    assert breakdown.world_size == WORLD_SIZE

# %% name="breakdown"
zero = step_of[0]
table(
    [
        [kind, name, f"{milliseconds:.1f}", percent(share)]
        for kind, name, milliseconds, share in zero.rows()
        if milliseconds >= 0.05
    ],
    ["", "name", "ms per step", "share, %"],
    align="llrr",
)
record(
    communication_share=100 * zero.communication.share,
    exposed_share=100 * zero.exposed.share,
)

# %% [markdown]
# ## A trace as a picture
#
# The same training with two wrappers. `SimpleDDP` sends after backward, `DistributedDataParallel`
# during it. One step of rank 0 under each, drawn from the traces: regions, work, messages.

# %% name="timeline"
simple_traces = train("simple", wrapper="simple")
simple = [break_down(trace) for trace in simple_traces]
assert simple[0].regions["sync_grads"].seconds > 5 * zero.regions["sync_grads"].seconds
assert zero.communication.seconds > 0
REGIONS = {  # and whether there is room for a label
    "load_batch": True,
    "data_movement": False,
    "forward": True,
    "backward": True,
    "sync_grads": True,
    "opt_step": False,
}


def draw_step(traces: dict[str, Trace], steps: dict[str, Event]) -> None:
    fig, axes = plt.subplots(figsize=(6.4, 3.4))
    lanes.draw(axes, traces, steps, REGIONS, RANK_COLORS)
    figure(fig)


drawn = {"SimpleDDP": simple_traces[0], "DDP": even[0]}
draw_step(drawn, {name: lanes.usual_step(trace) for name, trace in drawn.items()})

# %% [markdown]
# ## What rank 0 sees of the others
#
# The same training with one thing wrong in each.

# %% name="symptoms"
SLEEP = 0.3
straggler_traces = train("straggler", load_seconds=(0, SLEEP))
cases = {
    "nothing": step_of,
    "per-parameter messages": simple,
    "slow loading on both ranks": [
        break_down(trace) for trace in train("loader", load_seconds=(SLEEP, SLEEP))
    ],
    "slow loading on rank 1 only": [break_down(trace) for trace in straggler_traces],
}
both_slow = cases["slow loading on both ranks"]
straggler = cases["slow loading on rank 1 only"]
assert both_slow[0].regions["load_batch"].seconds > SLEEP
assert straggler[0].regions["load_batch"].seconds < SLEEP, "rank 0 itself is quick"
assert straggler[0].communication.seconds > straggler[1].communication.seconds + SLEEP / 3


def symptoms(name: str, step: Breakdown) -> list[str]:
    loading = step.regions["load_batch"].seconds / step.step_seconds
    shares = (loading, step.families["idle"].share, step.communication.share)
    return [name, f"{step.step_seconds * 1e3:.0f}", *map(percent, shares)]


COLUMNS = ["what is wrong", "ms per step", "loading, %", "idle, %", "messages, %"]
table([symptoms(name, steps[0]) for name, steps in cases.items()], COLUMNS, align="lrrrr")

# %% name="straggler"
table(
    [
        [f"rank {rank}", *symptoms("", step)[2:], percent(step.exposed.share)]
        for rank, step in enumerate(straggler)
    ],
    ["rank", *COLUMNS[2:], "exposed, %"],
    align="lrrrr",
)
record(
    sleep_milliseconds=SLEEP * 1e3,
    straggler_communication_0=straggler[0].communication.seconds * 1e3,
    straggler_communication_1=straggler[1].communication.seconds * 1e3,
    straggler_share_0=100 * straggler[0].communication.share,
)

# %% [markdown]
# ## A benchmark that measures no communication
#
# The same loop twice, taking turns: as it is, and with the synchronisation switched off. The ranks
# of the second one train apart.


# %% name="never-synchronises"
def benchmark(rank: int) -> tuple[unsynchronised.Benchmark, unsynchronised.Benchmark]:
    batches = [loader.batch(step, rank) for step in range(4)]
    return unsynchronised.with_and_without(build(), build(), batches, rounds=5)


synchronised, apart = miniddp.run_ranks(benchmark, WORLD_SIZE, backend=BACKEND, timeout=300)[0]
assert synchronised.spread == 0 < apart.spread
table(
    [
        [name, f"{1e3 * found.seconds:.0f}", f"{found.spread:.1g}"]
        for name, found in (("with `sync_gradients()`", synchronised), ("without it", apart))
    ],
    ["2 ranks", "ms per step", "largest difference of a weight"],
)
record(
    missing_share=100 * (1 - apart.seconds / synchronised.seconds),
)

# %% [markdown]
# ## A step of your own

# %% name="own-step"
ranks = min(WORLD_SIZE, torch.cuda.device_count()) if on_gpu else WORLD_SIZE  # of NCCL
torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
done = subprocess.run(
    [*torchrun, f"--nproc_per_node={ranks}", own_step.__file__],
    cwd=folder,
    capture_output=True,
    text=True,
    timeout=300,
    check=True,
)
print(done.stdout.strip())
assert len(list((folder / "traces").iterdir())) == ranks
