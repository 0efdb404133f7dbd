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
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForPreTraining,
    ResNetConfig,
    ResNetForImageClassification,
)

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
from instruments import measurements, network
from instruments.network import NODES
from instruments.predictions import LINKS, curve_of
from instruments.scaling import scaling_efficiency
from instruments.simulator import (
    COMMUNICATION,
    AllReduce,
    Layer,
    Step,
    buckets,
    expected_maximum,
    simulate,
)
from miniddp.bucket import MIB
from step_trace import LINK, REACHED, TOKENS, layers_of_smollm2

WORLD_SIZE = 2
provenance(device="cpu", world_size=WORLD_SIZE, backend="gloo")

# %% [markdown]
# ## The model and the link
#
# SmolLM2-360M with its gradients in float32, 8,192 tokens on each rank, on chips that reach 40 % of
# their peak. A layer's weights that multiply need 2 operations per token in forward and 4 in
# backward. The embedding is looked up, and its gradient is ready last. The link is the all-reduce
# that NVIDIA published for a node of eight H100.

# %% name="layers"
RANKS = 8
layers = layers_of_smollm2()
gradients = [size for layer in layers for size in layer.gradient_bytes]
link = LINK
record(
    tokens=TOKENS,
    reached=100 * REACHED,
    gradient_mb=sum(gradients) / 1e6,
    tensors=len(gradients),
    embedding_mb=gradients[0] / 1e6,
)

# %% [markdown]
# ## The bar that grows, and shrinks again

# %% name="bar"
ACCUMULATED = 4


def ways(
    layers: Sequence[Layer],
    link: AllReduce,
    cap: int,
    first: int,
    stolen: float = 0,
    packing: float = 0,
) -> dict[str, Step]:
    """A step as each chapter of the book leaves it; `packing` makes and unpacks the message."""
    one_message = [list(reversed(range(sum(len(layer.gradient_bytes) for layer in layers))))]
    plan = buckets(layers, cap, first)
    return {
        "a message per parameter": simulate(layers, link, overlapped=False),
        "one flat message": simulate(
            layers, lambda size: link(size) + packing, one_message, overlapped=False
        ),
        "buckets during backward": simulate(layers, link, plan, stolen=stolen),
        f"accumulation of {ACCUMULATED}": simulate(
            layers, link, plan, micro_batches=ACCUMULATED, stolen=stolen
        ),
    }


def per_micro_batch(name: str, seconds: float) -> float:
    return seconds / ACCUMULATED if name.startswith("accumulation") else seconds


found = ways(layers, link, 25 * MIB, MIB)
alone = found["one flat message"].compute
bars = {"compute alone": (alone, 0.0)}
for name, step in found.items():
    bars[name] = (per_micro_batch(name, step.compute), per_micro_batch(name, step.exposed))
waits = [exposed for _, exposed in bars.values()]
assert waits[1] > waits[2] > waits[3] > waits[4] > waits[0] == 0, "every chapter helps"

fig, axes = plt.subplots(figsize=(5.2, 2.6))
names = list(bars)
compute, waiting = ([1e3 * part for part in parts] for parts in zip(*bars.values(), strict=True))
axes.barh(names, compute, 0.6, color=SURFACE, edgecolor=FOREGROUND, label="computes")
axes.barh(names, waiting, 0.6, compute, color=WAITING, alpha=0.35, label="waits")
for row, (one, other) in enumerate(zip(compute, waiting, strict=True)):
    axes.text(one + other + 0.6, row, f"{one + other:.1f}", va="center", color=FOREGROUND)
axes.invert_yaxis()
axes.set(xlabel="ms for a micro-batch", xlim=(0, 1.18 * max(map(sum, bars.values())) * 1e3))
axes.grid(visible=False, axis="y")
fig.legend(loc="outside upper right", ncols=2)
figure(fig)

# %% name="bar-values"
record(
    alone_ms=1e3 * alone,
    naive_waits_ms=1e3 * waits[1],
    flat_waits_ms=1e3 * waits[2],
    overlapped_waits_ms=1e3 * waits[3],
    accumulated_waits_ms=1e3 * waits[4],
    accumulated=ACCUMULATED,
    buckets=len(buckets(layers)),
    last_bucket_mb=sum(gradients[i] for i in buckets(layers)[-1]) / 1e6,
)

# %% [markdown]
# ## A message for each gradient
#
# As soon as backward has a gradient, its all-reduce starts: on the node, and on eight such nodes by
# the network model. Which of these messages carry the bytes, and which take the link's time?

# %% name="messages"
NODE, MANY = RANKS, 8 * RANKS


def link_of(world_size: int) -> AllReduce:
    node = NODES["DGX H100"]
    return link if world_size == RANKS else lambda size: node.all_reduce_seconds(size, world_size)


def share_of(part: Sequence[float], cost: AllReduce) -> float:
    return 100 * sum(map(cost, part)) / sum(map(cost, gradients))


def megabytes(size: float) -> str:
    return f"{size / 1e6:.3g} MB" if size >= 1e5 else f"{size / 1e3:.3g} kB"


by_size = {size: [each for each in gradients if each == size] for size in sorted(set(gradients))}
table(
    [
        [megabytes(size), len(part), f"{share_of(part, float):.2f}"]
        + [f"{share_of(part, link_of(world_size)):.1f}" for world_size in (NODE, MANY)]
        for size, part in by_size.items()
    ],
    ["size", "messages", "bytes, %", f"time on {NODE}, %", f"on {MANY}, %"],
)

# %% name="messages-values"
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

# %% name="packed"
last_first = list(reversed(range(len(gradients))))
PLANS = {
    "a message for each gradient": [[i] for i in last_first],
    "one message, after backward": [last_first],
    "buckets": buckets(layers),
}


def busy_and_left(plan: list[list[int]], world_size: int) -> tuple[float, float]:
    """Milliseconds for which the link works, and for which the ranks wait for it."""
    cost = link_of(world_size)
    busy = sum(cost(sum(gradients[i] for i in bucket)) for bucket in plan)
    return 1e3 * busy, 1e3 * simulate(layers, cost, plan).exposed


packed = {
    (name, world_size): busy_and_left(plan, world_size)
    for name, plan in PLANS.items()
    for world_size in (NODE, MANY)
}
table(
    [
        [name, len(plan)]
        + [f"{value:.1f}" for size in (NODE, MANY) for value in packed[name, size]]
        for name, plan in PLANS.items()
    ],
    ["gradients travel as", "messages"]
    + [f"{what}, {size}" for size in (NODE, MANY) for what in ("link busy", "left")],
)
for size in (NODE, MANY):
    waits = [packed[name, size][1] for name in PLANS]
    assert min(waits) == waits[-1], "buckets leave the least"

# %% name="packed-values"
record(
    each_left_node=packed["a message for each gradient", NODE][1],
    each_left_many=packed["a message for each gradient", MANY][1],
    each_busy_many=packed["a message for each gradient", MANY][0],
    buckets_busy_many=packed["buckets", MANY][0],
    buckets_left_many=packed["buckets", MANY][1],
    flat_left_many=packed["one message, after backward", MANY][1],
)

# %% [markdown]
# ## One GPU, and eight
#
# Eight micro-batches: on one GPU one after the other, on eight GPUs at the same time.

# %% name="why"
EIGHT = {
    "eight GPUs,\nthe program\nbelow": bars["a message per parameter"],
    "eight GPUs,\nat the end of\nchapter 7": bars["buckets during backward"],
}
fig, axes = plt.subplots(figsize=(5.2, 3.4))
for number in range(RANKS):
    axes.barh(0, 1e3 * alone, 0.9, 1e3 * alone * number, color=SURFACE, edgecolor=FOREGROUND)
for group, (one, wait) in enumerate(EIGHT.values()):
    rows = [1.6 + 2.6 * group + 0.25 * rank for rank in range(RANKS)]
    axes.barh(rows, 1e3 * one, 0.22, color=RANK_COLORS[:RANKS], alpha=0.6, linewidth=0)
    axes.barh(rows, 1e3 * wait, 0.22, 1e3 * one, color=WAITING, alpha=0.35, linewidth=0)
    text = f"{1e3 * (one + wait):.1f} ms: {RANKS * alone / (one + wait):.1f} times as fast"
    axes.text(1e3 * (one + wait) + 6, rows[4], text, va="center", color=FOREGROUND)
ms = 1e3 * RANKS * alone
axes.text(ms, -0.7, f"{ms:.1f} ms", va="center", ha="right", color=FOREGROUND)
axes.text(1e3 * alone, 1.2, "waits", va="center", color=WAITING)
axes.invert_yaxis()
axes.set_yticks([0, 2.475, 5.075], ["one GPU", *EIGHT])
axes.set(xlabel="ms")
axes.grid(visible=False, axis="y")
figure(fig)

# %% name="why-values"
naive, overlapped = (sum(parts) for parts in EIGHT.values())
record(
    gpus=RANKS,
    one_gpu_ms=1e3 * RANKS * alone,
    naive_ms=1e3 * naive,
    naive_times=RANKS * alone / naive,
    naive_lost=100 * (1 - alone / naive),
    overlapped_times=RANKS * alone / overlapped,
)

# %% [markdown]
# ## Two streams
#
# The same steps in time: above what the GPU computes, below what is on its way.


# %% name="streams"
def draw(axes: plt.Axes, step: Step) -> None:
    for name in ("forward", "backward"):
        moments = [moment for span in step.spans if span.name.startswith(name)
                   for moment in (1e3 * span.start, 1e3 * span.end)]  # fmt: skip
        start, end = min(moments), max(moments)
        axes.barh(0, end - start, 0.8, start, color=SURFACE, edgecolor=FOREGROUND)
        axes.text((start + end) / 2, 0, name, ha="center", va="center", color=FOREGROUND)
    for span in step.spans:
        if span.stream == COMMUNICATION:
            start, length = 1e3 * span.start, 1e3 * (span.end - span.start)
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

# %% name="ranks"
SIZES = [2**power for power in range(15)]
SPREADS = [0, 0.01, 0.02, 0.05]
plan = buckets(layers)


def efficiency(world_size: int, spread: float) -> float:
    slowest = expected_maximum(
        lambda generator, n: 1 - spread + spread * generator.exponential(size=n), world_size
    )
    step = simulate(
        layers,
        lambda size: NODES["DGX H100"].all_reduce_seconds(size, world_size),
        plan,
        slowest=slowest,
    )
    return scaling_efficiency(step.compute, step.seconds)


kept = {spread: [100 * efficiency(size, spread) for size in SIZES] for spread in SPREADS}
fig, axes = plt.subplots()
for (spread, values), style in zip(kept.items(), ["-", "--", "-.", ":"], strict=True):
    axes.plot(SIZES, values, style, label=f"{100 * spread:g} %")
axes.set_xscale("log", base=2)
axes.set_xticks(SIZES[::2], [f"{size:,}" for size in SIZES[::2]])
axes.set(xlabel="ranks", ylabel="scaling efficiency, %", ylim=(0, 105))
axes.legend(title="ranks differ by", loc="lower left")
figure(fig)

# %% name="ranks-values"
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

# %% name="trainings"
with torch.device("meta"):
    TENSORS = {
        "ResNet-50": ResNetForImageClassification(ResNetConfig(num_labels=1000)),
        "BERT-Base": BertForPreTraining(BertConfig()),
        "BERT-Large": BertForPreTraining(
            BertConfig(
                hidden_size=1024,
                num_hidden_layers=24,
                num_attention_heads=16,
                intermediate_size=4096,
            )
        ),
    }


RATES = {"10GbE with TCP/IP": 10, "100GbIB with RDMA": 100}


def layers_of_training(model: nn.Module, compute: float) -> list[Layer]:
    """A layer per tensor. Compute follows the bytes; that of an embedding is none."""
    tensors = list(model.named_parameters())
    total = sum(tensor.nbytes for name, tensor in tensors if "embeddings" not in name)
    share = [0 if "embeddings" in name else tensor.nbytes / total for name, tensor in tensors]
    return [
        Layer(compute / 3 * part, compute * 2 / 3 * part, [tensor.nbytes])
        for (_, tensor), part in zip(tensors, share, strict=True)
    ]


def samples_per_second(row: measurements.Row, stolen: float) -> float:
    model, gpus, batch = row["model"], row["gpus"], row["batch_per_gpu"]
    link = curve_of(LINKS[row["link_between_nodes"]]).link()
    own = layers_of_training(TENSORS[model], batch / on_one[model])
    merged = buckets(own) if row["method"] == "MG-WFBP" else None
    step = simulate(own, lambda size: link.all_reduce_seconds(size, gpus), merged, stolen=stolen)
    return gpus * batch / step.seconds


published = measurements.read("data_parallel_10gbe_100gb_32gpu")
on_one = {row["model"]: row["samples_per_s_total"] for row in published if row["gpus"] == 1}
rows, outside, ideal = [], [], []
for row in published:
    overlaps = row["method"] in ("WFBP-A2A", "MG-WFBP")
    if not overlaps or row["gpus"] < 8 or row["link_between_nodes"] not in LINKS:
        continue
    low, high = (samples_per_second(row, stolen) for stolen in (1, 0))
    found = row["samples_per_s_total"]
    ideal.append(high / found - 1)
    outside.append(max(low / found - 1, found / high - 1, 0))
    if row["gpus"] == 32:
        numbers = [f"{number:,.0f}" for number in (low, found, high)]
        sent = "merged" if row["method"] == "MG-WFBP" else "per tensor"
        rows.append([row["model"], RATES[row["link_between_nodes"]], sent, *numbers])
table(rows, ["model", "Gb/s", "messages", "none hidden", "measured", "all hidden"], "lrlrrr")
assert max(outside) < 0.2, "what was measured lies between the two"

# %% name="trainings-values"
record(
    trainings=len(ideal),
    largest_outside=100 * max(outside),
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
WIDTH, LAYERS, BATCH, CAP_MIB, ROUNDS = 512, 8, 64, 2, 25
BURST = 8  # all-reduces in a row, as a step sends them
FEATURES = (WIDTH, WIDTH)


def network_of_layers() -> nn.Module:
    miniddp.set_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(*FEATURES), nn.ReLU()) for _ in range(LAYERS)])


def slowest_rank(seconds: float) -> float:
    longest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.item()


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the slowest rank, and the processor time of this rank."""
    dist.barrier()
    busy, start = time.process_time(), time.perf_counter()
    work()
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    return slowest_rank(seconds), busy


def one_message_each(model: nn.Module) -> None:
    for parameter in reversed(list(model.parameters())):
        dist.all_reduce(parameter.grad.div_(WORLD_SIZE))


def one_flat_message(model: nn.Module, send: bool = True) -> None:
    grads = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([grad.flatten() for grad in grads]).div_(WORLD_SIZE)
    if send:
        dist.all_reduce(flat)
    for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(mean.view_as(grad))


def step_of(
    model: nn.Module, inputs: Tensor, sync: Callable[[nn.Module], object] | None, count: int = 1
) -> None:
    for number in range(1, count + 1):
        with nullcontext() if number == count else model.no_sync():
            model(inputs).square().mean().backward()
    if sync:
        sync(model)


def measure(rank: int) -> tuple[dict[str, float], dict[int, tuple[float, float]]]:
    """Seconds of each way, and of an all-reduce by its bytes with its share of a core."""
    torch.set_num_threads(1)
    plain = network_of_layers()
    ddp = miniddp.DistributedDataParallel(network_of_layers(), bucket_cap_mb=CAP_MIB)
    inputs = torch.randn(BATCH, WIDTH)
    tensors = {tensor.nbytes: torch.zeros_like(tensor) for tensor in plain.parameters()}
    for nbytes in (CAP_MIB * MIB, sum(tensor.nbytes for tensor in plain.parameters())):
        tensors[nbytes] = torch.zeros(nbytes // 4)
    work: dict[str, Callable[[], object]] = {
        "alone": lambda: step_of(plain, inputs, None),
        "a message per parameter": lambda: step_of(plain, inputs, one_message_each),
        "one flat message": lambda: step_of(plain, inputs, one_flat_message),
        "buckets during backward": lambda: step_of(ddp, inputs, None),
        f"accumulation of {ACCUMULATED}": lambda: step_of(ddp, inputs, None, ACCUMULATED),
        "forward": lambda: plain(inputs),
        "packing": lambda: one_flat_message(plain, send=False),
    }
    links = {size: (lambda tensor=tensor: [dist.all_reduce(tensor) for _ in range(BURST)])
             for size, tensor in tensors.items()}  # fmt: skip
    taken: dict[object, list[tuple[float, float]]] = {name: [] for name in [*work, *links]}
    for _ in range(2 + ROUNDS):
        for name, each in [*work.items(), *links.items()]:
            taken[name].append(timed(each))
    fastest = {name: min(rounds[2:]) for name, rounds in taken.items()}
    return (
        {name: fastest[name][0] for name in work},
        {size: (fastest[size][0] / BURST, fastest[size][1] / fastest[size][0]) for size in links},
    )


measured, all_reduces = miniddp.run_ranks(measure, WORLD_SIZE, timeout=200)[0]
forward, whole = measured["forward"], measured["alone"]
weight, bias = (parameter.nbytes for parameter in nn.Linear(*FEATURES, device="meta").parameters())
own_layers = [
    Layer(forward / LAYERS, (whole - forward) / LAYERS, [weight, bias]) for _ in range(LAYERS)
]
own_link = network.fit_table(
    list(all_reduces), [seconds for seconds, _ in all_reduces.values()], WORLD_SIZE
).all_reduce_seconds
stolen = min(1.0, all_reduces[CAP_MIB * MIB][1])
cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
table(
    [
        [f"{size / 1e6:.3f}", f"{1e3 * seconds:.2f}", f"{share:.2f}"]
        for size, (seconds, share) in sorted(all_reduces.items())
    ],
    ["MB", "ms", "share of a core"],
)

# %% name="inputs-values"
record(
    cores=cores,
    rounds=ROUNDS,
    layers=LAYERS,
    width=WIDTH,
    batch=BATCH,
    cap_mib=CAP_MIB,
    forward_seconds=forward,
    compute_seconds=whole,
    stolen=stolen,
    packing_seconds=measured["packing"],
)

# %% name="measured"
cap = CAP_MIB * MIB
predicted = ways(own_layers, own_link, cap, cap, stolen, measured["packing"])
rows, errors = [], []
for name, step in predicted.items():
    guess, seconds = (per_micro_batch(name, each) for each in (step.seconds, measured[name]))
    errors.append(guess / seconds - 1)
    rows.append([name, f"{1e3 * guess:.1f}", f"{1e3 * seconds:.1f}", f"{100 * errors[-1]:+.0f}"])
table(rows, ["gradients travel as", "predicted ms", "measured ms", "error, %"], "lrrr")

# %% name="measured-values"
record(worst_error=100 * max(map(abs, errors)))
