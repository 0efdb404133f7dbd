# %% [markdown]
# # A step, simulated
#
# `instruments.simulator` works out a training step from three things: what each layer computes and
# sends, which gradients travel together, and what the link takes for an all-reduce. This run draws
# the step of a model on eight H100, as each chapter makes it shorter, and follows it to 16,384
# ranks. Then it measures such a step on this machine and sets the simulator's beside it. Only the
# last part has measured anything here.

# %% name="setup"
import os
import statistics
from collections.abc import Sequence

import matplotlib.pyplot as plt

import miniddp
from book import (
    FOREGROUND,
    MUTED,
    RANK_COLORS,
    SURFACE,
    WAITING,
    figure,
    provenance,
    record,
    table,
)
from instruments import h100, ways
from instruments.many_ranks import efficiency, wait_of
from instruments.network import NODES
from instruments.overlapped import trainings as trainings_with_overlap
from instruments.simulator import COMMUNICATION, NO_COPIES, AllReduce, Step, buckets
from instruments.step_trace import LINK, OPTIMIZER, TOKENS
from instruments.step_trace import layers as layers_of_smollm2
from instruments.step_trace import ways as ways_of_smollm2

WORLD_SIZE = 2
provenance(device="cpu", world_size=WORLD_SIZE, backend="gloo")

# %% [markdown]
# ## The model and the link
#
# SmolLM2-360M with its gradients in float32, 8,192 tokens on each rank, on chips that reach 40 % of
# their peak. A weight that multiplies needs 2 operations per token in forward and 4 in backward.
# The embedding is looked up, and its gradient is ready last. The link is the all-reduce that NVIDIA
# published for a node of eight H100.
#
# The rest of the step moves bytes through the GPU's memory, at the bandwidth of the data sheet:
# AdamW 28 for each parameter; to copy a gradient into its bucket, and the mean back, 8 each. While
# a message travels, NCCL's kernel takes multiprocessors from compute: 8 of 108, as in a published
# trace of two A100.

# %% name="layers" badge="computed"
RANKS = 8
layers = layers_of_smollm2()
gradients = [size for layer in layers for size in layer.gradient_bytes]
record(
    tokens=TOKENS,
    reached=100 * h100.REACHED,
    optimizer_ms=1e3 * OPTIMIZER,
    copies_ms=1e3 * sum(h100.COPIES) * sum(gradients),
    multiprocessors_percent=100 * h100.STOLEN,
    gradient_mb=sum(gradients) / 1e6,
    tensors=len(gradients),
    embedding_mb=gradients[0] / 1e6,
)

# %% [markdown]
# ## The bar that grows, and shrinks again

# %% name="bar" badge="computed"
found = ways_of_smollm2()
alone = found[ways.FLAT].compute
bars = {"compute alone": (alone, 0.0)}
for name, step in found.items():
    bars[name] = (
        ways.per_micro_batch(name, step.compute),
        ways.per_micro_batch(name, step.exposed),
    )
waits = [exposed for _, exposed in bars.values()]
assert waits[1] > waits[2] > waits[3] > waits[4] > waits[0] == 0, "every chapter helps"

fig, axes = plt.subplots(figsize=(5.2, 2.6))
names = list(bars)
compute = [1e3 * computes for computes, _ in bars.values()]
waiting = [1e3 * exposed for _, exposed in bars.values()]
axes.barh(names, compute, 0.6, color=SURFACE, edgecolor=FOREGROUND, label="computes")
axes.barh(names, waiting, 0.6, compute, color=WAITING, alpha=0.35, label="waits")
for row, (one, other) in enumerate(zip(compute, waiting, strict=True)):
    axes.text(one + other + 0.6, row, f"{one + other:.1f}", va="center", color=FOREGROUND)
axes.invert_yaxis()
axes.set(xlabel="ms for a micro-batch", xlim=(0, 1.18 * max(map(sum, bars.values())) * 1e3))
axes.grid(visible=False, axis="y")
fig.legend(loc="outside upper right", ncols=2)
figure(fig)

# %% name="bar-values" badge="computed"
record(
    alone_ms=1e3 * alone,
    backward_ms=1e3 * (alone - OPTIMIZER) * 2 / 3,
    naive_waits_ms=1e3 * waits[1],
    flat_waits_ms=1e3 * waits[2],
    overlapped_waits_ms=1e3 * waits[3],
    accumulated_waits_ms=1e3 * waits[4],
    accumulated=ways.MICRO_BATCHES,
    buckets=len(buckets(layers)),
    last_bucket_mb=sum(gradients[i] for i in buckets(layers)[-1]) / 1e6,
    flat_against_buckets=100 * (1 - found[ways.OVERLAPPED].seconds / found[ways.FLAT].seconds),
)

# %% [markdown]
# ## A message for each gradient
#
# As soon as backward has a gradient, its all-reduce starts: on the node, and on eight such nodes by
# the network model. Which of these messages carry the bytes, and which take the link's time?

# %% name="messages" badge="computed"
NODE = RANKS
MANY = 8 * RANKS


def link_of(world_size: int) -> AllReduce:
    """Measured on a node, by the network model on several."""
    if world_size == NODE:
        return LINK
    return lambda size: NODES["DGX H100"].all_reduce_seconds(size, world_size)


def share_of(part: Sequence[float], cost: AllReduce) -> float:
    return 100 * sum(map(cost, part)) / sum(map(cost, gradients))


def megabytes(size: float) -> str:
    return f"{size / 1e6:.3g} MB" if size >= 1e5 else f"{size / 1e3:.3g} kB"


rows = []
for size in sorted(set(gradients)):
    alike = [size] * gradients.count(size)
    times = [f"{share_of(alike, link_of(ranks)):.1f}" for ranks in (NODE, MANY)]
    rows.append([megabytes(size), len(alike), f"{share_of(alike, float):.2f}", *times])
table(rows, ["size", "messages", "bytes, %", f"time on {NODE}, %", f"on {MANY}, %"])

# %% name="messages-values" badge="computed"
TINY = 1e4
tiny = [size for size in gradients if size < TINY]
record(
    tiny=len(tiny),
    tiny_bytes_share=share_of(tiny, float),
    tiny_time_share=share_of(tiny, link_of(MANY)),
    node=NODE,
    many=MANY,
)

# %% [markdown]
# The same gradients in one message after backward, and in buckets during backward.

# %% name="packed" badge="computed"
last_first = list(reversed(range(len(gradients))))
SINGLE = [[i] for i in last_first]
PLANS = {
    "a message for each gradient": (SINGLE, NO_COPIES),
    "one message, after backward": ([last_first], h100.COPIES),
    "buckets": (buckets(layers), h100.COPIES),
}


packed = {
    (name, ranks): wait_of(layers, plan, link_of(ranks), h100.STOLEN, copies)
    for name, (plan, copies) in PLANS.items()
    for ranks in (NODE, MANY)
}
rows = []
for name, (plan, _) in PLANS.items():
    numbers = [f"{1e3 * part:.1f}" for ranks in (NODE, MANY) for part in packed[name, ranks]]
    rows.append([name, len(plan), *numbers])
columns = [f"{what}, {ranks}" for ranks in (NODE, MANY) for what in ("link busy", "longer by")]
table(rows, ["gradients travel as", "messages", *columns])
left = {name: packed[name, MANY].left for name in PLANS}
assert left["buckets"] == min(left.values()), "between machines buckets cost the least"

# %% name="packed-values" badge="computed"
record(
    each_left_node=1e3 * packed["a message for each gradient", NODE].left,
    each_left_many=1e3 * packed["a message for each gradient", MANY].left,
    each_busy_many=1e3 * packed["a message for each gradient", MANY].busy,
    buckets_busy_many=1e3 * packed["buckets", MANY].busy,
    buckets_left_many=1e3 * packed["buckets", MANY].left,
    buckets_left_node=1e3 * packed["buckets", NODE].left,
    flat_left_many=1e3 * packed["one message, after backward", MANY].left,
)

# %% [markdown]
# ## One GPU, and eight
#
# Eight micro-batches: on one GPU one after the other, then one update, on eight GPUs at the same
# time.

# %% name="why" badge="computed"
EIGHT = {
    "eight GPUs,\nthe program\nbelow": bars[ways.PER_PARAMETER],
    "eight GPUs,\nat the end of\nchapter 7": bars[ways.OVERLAPPED],
}
fig, axes = plt.subplots(figsize=(5.2, 3.4))
one_batch = alone - OPTIMIZER
one_gpu = RANKS * one_batch + OPTIMIZER
for number in range(RANKS):
    width = 1e3 * one_batch
    axes.barh(0, width, 0.9, width * number, color=SURFACE, edgecolor=FOREGROUND)
for group, (one, wait) in enumerate(EIGHT.values()):
    rows = [1.6 + 2.6 * group + 0.25 * rank for rank in range(RANKS)]
    axes.barh(rows, 1e3 * one, 0.22, color=RANK_COLORS[:RANKS], alpha=0.6, linewidth=0)
    axes.barh(rows, 1e3 * wait, 0.22, 1e3 * one, color=WAITING, alpha=0.35, linewidth=0)
    text = f"{1e3 * (one + wait):.1f} ms: {one_gpu / (one + wait):.1f} times as fast"
    axes.text(1e3 * (one + wait) + 6, rows[4], text, va="center", color=FOREGROUND)
ms = 1e3 * one_gpu
axes.text(ms, -0.7, f"{ms:.1f} ms", va="center", ha="right", color=FOREGROUND)
axes.text(1e3 * alone, 1.2, "waits", va="center", color=WAITING)
axes.invert_yaxis()
axes.set_yticks([0, 2.475, 5.075], ["one GPU", *EIGHT])
axes.set(xlabel="ms")
axes.grid(visible=False, axis="y")
figure(fig)

# %% name="why-values" badge="computed"
naive, hidden = (sum(parts) for parts in EIGHT.values())
record(
    gpus=RANKS,
    one_gpu_ms=1e3 * one_gpu,
    naive_ms=1e3 * naive,
    naive_times=one_gpu / naive,
    naive_lost=100 * (1 - alone / naive),
    overlapped_times=one_gpu / hidden,
)

# %% [markdown]
# ## Two streams
#
# The same steps in time: above what the GPU computes, below what is on its way. After backward
# buckets are emptied, and the optimizer takes its step.


# %% name="streams" badge="computed"
def draw(axes: plt.Axes, step: Step) -> None:
    for name in ("forward", "backward", "empty", "optimizer"):
        spans = [span for span in step.spans if span.name.startswith(name)]
        if not spans:
            continue
        start = 1e3 * min(span.start for span in spans)
        end = 1e3 * max(span.end for span in spans)
        axes.barh(0, end - start, 0.8, start, color=SURFACE, edgecolor=FOREGROUND)
        if name in ("forward", "backward"):
            axes.text((start + end) / 2, 0, name, ha="center", va="center", color=FOREGROUND)
    for span in step.spans:
        if span.stream == COMMUNICATION:
            length = 1e3 * (span.end - span.start)
            start = 1e3 * span.start
            axes.barh(1, length, 0.8, start, color=RANK_COLORS[0], alpha=0.6, linewidth=0)
    axes.set_yticks([0, 1], ["compute", "link"])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")


shown = list(found)[:3]
fig, panels = plt.subplots(len(shown), 1, figsize=(5.2, 3.9), sharex=True)
for axes, name in zip(panels, shown, strict=True):
    draw(axes, found[name])
    axes.set_title(name, color=MUTED)
panels[-1].set(xlabel="ms")
figure(fig)

# %% [markdown]
# ## To 16,384 ranks
#
# Nodes of eight H100 with eight cards of 400 Gb/s each, by the network model. The compute of a rank
# is drawn anew in each step: a usual one, and a delay from an exponential distribution. The step
# waits for the slowest rank. The seed is fixed, and each point is the mean of 200 draws.

# %% name="ranks" badge="computed"
SIZES = [2**power for power in range(15)]
SPREADS = [0, 0.01, 0.02, 0.05]
plan = buckets(layers)


nodes = NODES["DGX H100"]


def kept_on(size: int, spread: float) -> float:
    """Scaling efficiency in per cent."""
    rest = (h100.STOLEN, h100.COPIES, OPTIMIZER)
    return 100 * efficiency(layers, plan, nodes, size, spread, *rest)


kept = {spread: [kept_on(size, spread) for size in SIZES] for spread in SPREADS}
fig, axes = plt.subplots()
for (spread, values), style in zip(kept.items(), ["-", "--", "-.", ":"], strict=True):
    axes.plot(SIZES, values, style, label=f"{100 * spread:g} %")
axes.set_xscale("log", base=2)
axes.set_xticks(SIZES[::2], [f"{size:,}" for size in SIZES[::2]])
axes.set(xlabel="ranks", ylabel="scaling efficiency, %", ylim=(0, 105))
axes.legend(title="ranks differ by", loc="lower left")
figure(fig)

# %% name="ranks-values" badge="computed"
record(
    most_ranks=SIZES[-1],
    kept_even=kept[0][-1],
    kept_2=kept[0.02][-1],
    kept_5=kept[0.05][-1],
)

# %% [markdown]
# ## Trainings with overlap, as others measured them
#
# Three models on 8 to 32 GPUs over two networks, with a message per tensor during backward (WFBP)
# and with merged messages (MG-WFBP; here buckets of 25 MiB). The time of one GPU and a table of the
# link go in. Each training is simulated twice: with messages that cost no compute, and with
# messages that take all of it, so that nothing is hidden. What is unknown lies between: what NCCL's
# kernels and the host's memory take of backward, and how long Horovod's ranks need to agree on what
# to send.

# %% name="trainings" badge="computed"
RATES = {"10GbE with TCP/IP": 10, "100GbIB with RDMA": 100}
trainings = trainings_with_overlap()
rows = []
for training in trainings:
    if training.gpus == 32:
        rates = (training.lowest, training.measured, training.highest)
        numbers = [f"{rate:,.0f}" for rate in rates]
        rows.append([training.model, RATES[training.link], training.messages, *numbers])
table(rows, ["model", "Gb/s", "messages", "none hidden", "measured", "all hidden"], "lrlrrr")
largest_outside = max(training.outside for training in trainings)
assert largest_outside < 0.2, "what was measured lies between the two"

# %% name="trainings-values" badge="computed"
ideal = [training.too_much for training in trainings]
record(
    trainings=len(trainings),
    largest_outside=100 * largest_outside,
    median_ideal=100 * statistics.median(map(abs, ideal)),
    largest_ideal=100 * max(ideal),
)

# %% [markdown]
# ## On this machine: predicted, and measured
#
# Two ranks with a core each train eight equal layers. What goes into the simulator is measured: the
# compute of a rank while the other one computes too, all-reduces of the sizes that are sent, the
# part of a core that an all-reduce keeps busy, and the time to pack and unpack one message. All of
# it takes its turn in every round, and the fastest round counts: whatever else runs on the machine
# can only add time.

# %% name="inputs"
BENCH = ways.Bench(width=512, layers=8, batch=64, cap_mib=2, rounds=25)
measured = miniddp.run_ranks(ways.measure_ways, WORLD_SIZE, BENCH, timeout=200)[0]
cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
table(
    [
        [f"{size / 1e6:.3f}", f"{1e3 * seconds:.2f}", f"{measured.share_of_core[size]:.2f}"]
        for size, seconds in sorted(measured.all_reduces.items())
    ],
    ["MB", "ms", "share of a core"],
)

# %% name="inputs-values"
record(
    cores=cores,
    rounds=BENCH.rounds,
    layers=BENCH.layers,
    width=BENCH.width,
    batch=BENCH.batch,
    cap_mib=BENCH.cap_mib,
    forward_seconds=measured.forward,
    compute_seconds=measured.compute,
    stolen=measured.stolen,
    packing_seconds=measured.packing,
)

# %% name="measured"
rows = []
errors = []
for name, step in measured.simulated(WORLD_SIZE).items():
    guess = ways.per_micro_batch(name, step.seconds)
    seconds = ways.per_micro_batch(name, measured.ways[name])
    errors.append(guess / seconds - 1)
    rows.append([name, f"{1e3 * guess:.1f}", f"{1e3 * seconds:.1f}", f"{100 * errors[-1]:+.0f}"])
table(rows, ["gradients travel as", "predicted ms", "measured ms", "error, %"], "lrrr")

# %% name="measured-values"
record(worst_error=100 * max(map(abs, errors)))
