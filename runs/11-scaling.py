# %% [markdown]
# # How far it scales
#
# What a step of DDP takes on more ranks, first by a model of three measured numbers, then measured.
# One rank gets one core and one thread in every setting, so a core plays the part of a GPU. The
# second half keeps the samples and makes the batch larger, as more ranks do, and looks at what is
# learned.

# %% name="setup"
import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import miniddp
from book import FOREGROUND, LINE, MUTED, figure, provenance, record, table
from instruments import bench_ring, network
from instruments.cost import Link, ring_all_reduce_seconds
from instruments.learning_rate import linear_scaling, square_root_scaling, warmup
from instruments.scaling import scaling_efficiency
from instruments.simulator import even_layers, simulate
from miniddp import DistributedDataParallel

provenance(device="cpu", world_size=[1, 2, 4], backend="gloo")
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
LAYERS, BUCKET_MIB, ROUNDS = 8, 2, 25  # on a busy machine few rounds are undisturbed
WIDTHS = {"small": 256, "middle": 512, "large": 1024}
record(cores=CORES, rounds=ROUNDS, layers=LAYERS, bucket_mib=BUCKET_MIB)


def build(size: str) -> nn.Module:
    """Layers of equal width: backward makes as many bytes of gradients in every second."""
    miniddp.set_seed(0)
    width = WIDTHS[size]
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers)


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# %% [markdown]
# ## Three ways to take a step
#
# - *alone*: rank 0 takes a step, the other ranks wait at a barrier;
# - *together*: all ranks take the step at once, each for itself, without a message;
# - *ddp*: all ranks take it at once and average their gradients.
#
# The three take turns in every round, in the same processes, and the fastest round of each counts:
# whatever else runs on the machine can only add time. Alone and together differ by what the
# cores share, together and ddp by the communication.


# %% name="measure"
@dataclass(frozen=True)
class Measured:
    """Seconds of the slowest rank in the fastest round; `backward` belongs to `alone`."""

    batch: int
    alone: float
    backward: float
    together: float
    ddp: float


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor) -> tuple[float, float]:
    """The seconds of a training step, and those of its backward pass."""
    start = time.perf_counter()
    optimizer.zero_grad()
    loss = model(inputs).square().mean()
    forward_end = time.perf_counter()
    loss.backward()
    backward_end = time.perf_counter()
    optimizer.step()
    return time.perf_counter() - start, backward_end - forward_end


def slowest(seconds: float) -> float:
    longest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.item()


def measure(rank: int, size: str, batches: Sequence[int]) -> tuple[list[Measured], list[int]]:
    torch.set_num_threads(1)
    plain = build(size)
    ddp = DistributedDataParallel(build(size), bucket_cap_mb=BUCKET_MIB)
    of_plain = torch.optim.SGD(plain.parameters(), lr=1e-3)
    of_ddp = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    measured = []
    for batch in batches:
        inputs = torch.randn(batch, WIDTHS[size])
        rounds = []
        for _ in range(2 + ROUNDS):
            dist.barrier()
            alone, backward = step(plain, of_plain, inputs) if rank == 0 else (0.0, 0.0)
            dist.barrier()
            together, _ = step(plain, of_plain, inputs)
            dist.barrier()
            with_messages, _ = step(ddp, of_ddp, inputs)
            rounds.append([slowest(s) for s in (alone, backward, together, with_messages)])
        warm = rounds[2:]
        measured.append(Measured(batch, *map(min, zip(*warm, strict=True))))
    return measured, [bucket.buffer().nbytes for bucket in ddp.reducer.buckets]


def measure_ranks(world_size: int, size: str, batches: Sequence[int]) -> dict[int, Measured]:
    measured, buckets = miniddp.run_ranks(measure, world_size, size, batches, timeout=300)[0]
    assert sum(buckets) == 4 * count_parameters(build(size)), "every gradient is in a bucket"
    BUCKETS[size] = buckets
    return {row.batch: row for row in measured}


BATCHES = [1, 8, 16, 64, 256, 512]
BUCKETS: dict[str, list[int]] = {}
times = {
    (2, "small"): measure_ranks(2, "small", [1, 16, 256]),
    (2, "middle"): measure_ranks(2, "middle", BATCHES),
    (2, "large"): measure_ranks(2, "large", [1, 16, 256]),
    (4, "middle"): measure_ranks(4, "middle", [1, 16, 256]),
}
sweep = times[2, "middle"]

# %% [markdown]
# ## Two ranks, slower than one and faster than one

# %% name="teaser"
SMALLEST, LARGEST = BATCHES[0], BATCHES[-1]


def samples_per_second(row: Measured) -> tuple[float, float]:
    return row.batch / row.alone, 2 * row.batch / row.ddp


rows, speedups = [], {}
for batch in (SMALLEST, LARGEST):
    one, two = samples_per_second(sweep[batch])
    speedups[batch] = two / one
    rows.append([batch, f"{one:,.0f}", f"{two:,.0f}", f"{two / one:.2f}"])
assert speedups[SMALLEST] < 1, "two ranks are slower than one"
assert speedups[LARGEST] > 1, "two ranks are faster than one"
table(rows, ["batch", "one rank", "two ranks", "speed-up"], "rrrr")

# %% name="teaser-values"
record(
    millions=count_parameters(build("middle")) / 1e6,
    gradient_mb=4 * count_parameters(build("middle")) / 1e6,
    smallest=SMALLEST,
    largest=LARGEST,
    speedup_smallest=speedups[SMALLEST],
    speedup_largest=speedups[LARGEST],
    slower_by=1 / speedups[SMALLEST],
)

# %% name="where"
rows = []
for row in sweep.values():
    shared, messages = row.together - row.alone, row.ddp - row.together
    rows.append([row.batch, *(f"{1e3 * s:.2f}" for s in (row.alone, shared, messages, row.ddp))])
table(rows, ["batch", "alone", "+ sharing", "+ messages", "two ranks"], "rrrrr")

# %% [markdown]
# ## The model, before it is compared
#
# What goes in: the step of one rank alone, its backward part, and the link: all-reduces of two
# ranks by size. They are used for four ranks as well.


# %% name="link"
SIZES = [20_000, 100_000, 500_000, 1_000_000, 2_000_000, 4_000_000, 8_000_000]
timings = bench_ring.bench(2, SIZES, 15, ["library"])
link = network.fit(SIZES, [timing.seconds for timing in timings], 2)
line = Link(*bench_ring.fit(timings))
record(alpha_us=1e6 * line.alpha, beta_ns=1e9 * line.beta, gb_per_second=1e-9 / line.beta)
rows = []
for timing in timings:
    of_line = ring_all_reduce_seconds(timing.bytes, 2, line)
    seconds = [timing.seconds, link.all_reduce_seconds(timing.bytes), of_line]
    rows.append([f"{timing.bytes / 1e6:g}", *(f"{1e3 * each:.2f}" for each in seconds)])
table(rows, ["MB", "measured ms", "used ms", "one line ms"], "rrrr")


# %% name="predict"
@dataclass(frozen=True)
class Prediction:
    """Seconds of a step if messages hide behind backward, and if none of them does."""

    hidden: float
    exposed: float


def predict(
    step: float, backward: float, bucket_bytes: Sequence[int], world_size: int
) -> Prediction:
    """From the step of one rank alone, and its backward part, to that of `world_size` ranks."""
    sharing = max(1, world_size / CORES)  # ranks that share a core take turns
    step, backward = step * sharing, backward * sharing
    layers = even_layers(bucket_bytes, step - backward, backward)

    def all_reduce(size: float) -> float:
        return link.all_reduce_seconds(size, world_size)

    hidden = simulate(layers, all_reduce)
    return Prediction(hidden.seconds, hidden.compute + hidden.communication)


# %% name="compare"
def predicted(world_size: int, size: str, row: Measured) -> Prediction:
    return predict(row.alone, row.backward, BUCKETS[size], world_size)


rows, errors = [], {}
for (world_size, size), by_batch in times.items():
    for batch in (1, 16, 256):
        row = by_batch[batch]
        guess = predicted(world_size, size, row)
        errors[world_size, size, batch] = error = guess.exposed / row.ddp - 1
        span = f"{1e3 * guess.hidden:.1f}–{1e3 * guess.exposed:.1f}"
        millions = f"{count_parameters(build(size)) / 1e6:.1f}"
        measured_ms = f"{1e3 * row.ddp:.1f}"
        rows.append([millions, world_size, batch, span, measured_ms, f"{100 * error:+.0f}"])
table(rows, ["P", "N", "b", "predicted", "step", "error"], "rrrrrr")

# %% name="compare-values"
absolute = sorted(abs(error) for error in errors.values())
record(
    median_error=100 * statistics.median(absolute),
    worst_error=100 * absolute[-1],
    comparisons=len(absolute),
)
assert statistics.median(absolute) < 1, "the model is right to a factor of two, mostly"

# %% [markdown]
# ## Efficiency over the batch per rank

# %% name="efficiency"
fig, axes = plt.subplots()
guesses = [predicted(2, "middle", row) for row in sweep.values()]
alone = [row.alone for row in sweep.values()]
measured_efficiency = [scaling_efficiency(row.alone, row.ddp) for row in sweep.values()]
top = [100 * scaling_efficiency(a, guess.hidden) for a, guess in zip(alone, guesses, strict=True)]
low = [100 * scaling_efficiency(a, guess.exposed) for a, guess in zip(alone, guesses, strict=True)]
axes.plot(BATCHES, top, "--", color=MUTED, label="model, messages hidden")
axes.plot(BATCHES, low, ":", color=MUTED, label="model, messages exposed")
axes.plot(BATCHES, [100 * e for e in measured_efficiency], "o-", color=FOREGROUND, label="measured")
axes.axhline(50, color=LINE, linewidth=1, label="below: slower than one rank")
axes.set_xscale("log", base=2)
axes.set_xticks(BATCHES, labels=[str(batch) for batch in BATCHES])
axes.set(xlabel="batch per rank", ylabel="efficiency of two ranks, %", ylim=(0, 105))
fig.legend(loc="outside lower center", ncols=2)
figure(fig)

# %% name="efficiency-values"
record(
    efficiency_smallest=100 * measured_efficiency[0],
    efficiency_largest=100 * measured_efficiency[-1],
)

# %% [markdown]
# ## Strong scaling: the same joined batch on more ranks

# %% name="strong"
rows = []
for joined in (512, 16):
    own = joined // 2
    one, two = sweep[joined].alone, sweep[own].ddp
    rows.append([joined, f"{1e3 * one:.1f}", f"{1e3 * two:.1f}", f"{one / two:.2f}"])
table(rows, ["joined batch", "one rank", "two ranks", "speed-up"], "rrrr")

# %% [markdown]
# ## Learning: the same samples in larger batches
#
# A small classifier learns from noisy labels. Every training sees the same samples once. More ranks
# mean a larger joined batch and fewer steps. One process with the joined batch stands in for the
# ranks; the cell `ranks` checks that with four real ones.

# %% name="task"
INPUTS, CLASSES, HIDDEN, SAMPLES, BASE, SEEDS = 32, 10, 64, 8192, 8, 3
RATE, ADAM_RATE = 0.05, 1e-3


def points(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points, and labels drawn by chance from what a fixed network says of them."""
    generator = torch.Generator().manual_seed(7)
    first = torch.randn(INPUTS, 24, generator=generator) / 4
    second = torch.randn(24, CLASSES, generator=generator)
    generator.manual_seed(seed)
    inputs = torch.randn(count, INPUTS, generator=generator)
    probabilities = (inputs @ first).tanh().mm(second).softmax(1)
    return inputs, torch.multinomial(probabilities, 1, generator=generator).squeeze(1)


def classifier(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    widths = [INPUTS, HIDDEN, HIDDEN, HIDDEN, CLASSES]
    layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
    for layer in layers:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return nn.Sequential(*[part for layer in layers for part in (layer, nn.ReLU())][:-1])


def epoch(seed: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(seed))
    for chosen in order.split(batch):
        yield training_points[0][chosen], training_points[1][chosen]


def train(
    optimizer: type, seed: int, batch: int, rate: float, warmup_steps: int = 0, start: float = 0
) -> tuple[nn.Module, list[float]]:
    """One pass over the samples: the model, and the loss of each batch."""
    model = classifier(seed)
    optim = optimizer(model.parameters(), lr=rate)
    losses = []
    for step, (inputs, labels) in enumerate(epoch(seed, batch)):
        optim.param_groups[0]["lr"] = warmup(step, warmup_steps, start, rate)
        loss = cross_entropy(model(inputs), labels)
        optim.zero_grad()
        loss.backward()
        optim.step()
        losses.append(loss.item())
    return model, losses


def test_loss(model: nn.Module) -> float:
    with torch.no_grad():
        loss = cross_entropy(model(test_points[0]), test_points[1]).item()
    return loss if math.isfinite(loss) else math.inf


training_points, test_points = points(SAMPLES, 1), points(4000, 2)
GUESSING = math.log(CLASSES)
torch.set_num_threads(1)

# %% name="rates"
FACTORS = [1, 2, 4, 8, 16, 32, 64]
WARM = 0.2  # of the steps
RULES = {
    "same rate": lambda seed, k: train(torch.optim.SGD, seed, k * BASE, RATE),
    "rate × k": lambda seed, k: train(
        torch.optim.SGD, seed, k * BASE, linear_scaling(RATE, BASE, k * BASE)
    ),
    "rate × k, warm-up": lambda seed, k: train(
        torch.optim.SGD,
        seed,
        k * BASE,
        linear_scaling(RATE, BASE, k * BASE),
        int(WARM * SAMPLES / (k * BASE)),
        RATE,
    ),
}
sgd = {
    name: [
        statistics.mean(min(GUESSING, test_loss(rule(seed, k)[0])) for seed in range(SEEDS))
        for k in FACTORS
    ]
    for name, rule in RULES.items()
}
same, linear, warm = sgd.values()
assert same[2] - same[0] > 3 * abs(linear[2] - linear[0]), "at 4 times the batch the rule helps"
assert linear[-1] - linear[0] > 0.2, "at 64 times the batch it does not keep up"

fig, axes = plt.subplots()
styles = [("-", "o"), ("--", "s"), (":", "^")]
for (name, losses), (dash, marker) in zip(sgd.items(), styles, strict=True):
    axes.plot(FACTORS, losses, dash, marker=marker, label=name)
axes.axhline(GUESSING, color=LINE, linewidth=1)
axes.annotate("guessing", (1, GUESSING), va="top", color=MUTED)
axes.set_xscale("log", base=2)
axes.set_xticks(FACTORS, labels=[str(k) for k in FACTORS])
axes.set(xlabel="batch, in multiples of the base batch", ylabel="loss on other samples")
axes.legend(loc="upper left", bbox_to_anchor=(0, 0.93))
figure(fig)

# %% name="rates-values"
record(
    samples=SAMPLES,
    base_batch=BASE,
    seeds=SEEDS,
    factor_most=FACTORS[-1],
    steps_base=SAMPLES // BASE,
    steps_most=SAMPLES // (BASE * FACTORS[-1]),
    loss_base=same[0],
    loss_same_4=same[2],
    loss_linear_4=linear[2],
    loss_linear_most=linear[-1],
)


# %% name="ranks"
def train_on_ranks(rank: int, world_size: int) -> float:
    torch.set_num_threads(1)
    model = DistributedDataParallel(classifier(0))
    optim = torch.optim.SGD(model.parameters(), lr=linear_scaling(RATE, BASE, world_size * BASE))
    for inputs, labels in epoch(0, world_size * BASE):
        own = slice(rank * BASE, (rank + 1) * BASE)
        optim.zero_grad()
        cross_entropy(model(inputs[own]), labels[own]).backward()
        optim.step()
    return test_loss(model.module)


of_ranks = miniddp.run_ranks(train_on_ranks, 4, 4, timeout=200)
of_one = test_loss(RULES["rate × k"](0, 4)[0])
assert all(abs(loss / of_one - 1) < 0.02 for loss in of_ranks)
record(loss_of_ranks=of_ranks[0], loss_of_one=of_one)

# %% name="start"
AT = 32
plain_losses = RULES["rate × k"](0, AT)[1]
warm_losses = RULES["rate × k, warm-up"](0, AT)[1]
first = plain_losses[0]
assert max(plain_losses) > 1.2 * first, "without warm-up the loss jumps"
assert max(warm_losses) < max(plain_losses)
record(start_factor=AT, first_loss=first, peak_plain=max(plain_losses), peak_warm=max(warm_losses))

fig, axes = plt.subplots()
axes.plot(plain_losses, "--", label="rate × k")
axes.plot(warm_losses, ":", label="rate × k, warm-up")
axes.set(xlabel="step", ylabel="loss of the batch", ylim=(0, None))
axes.legend()
figure(fig)

# %% name="adam"
rows, adam = [], {}
for k in (1, 4, 16, 32):
    rates = ADAM_RATE, square_root_scaling(ADAM_RATE, BASE, k * BASE), ADAM_RATE * k
    adam[k] = [
        statistics.mean(
            test_loss(train(torch.optim.Adam, seed, k * BASE, rate)[0]) for seed in range(SEEDS)
        )
        for rate in rates
    ]
    rows.append([k, *(f"{loss:.2f}" for loss in adam[k])])
assert abs(adam[16][1] - adam[1][0]) < abs(adam[16][0] - adam[1][0])
table(rows, ["batch × k", "same rate", "rate × √k", "rate × k"], "rrrr")

# %% [markdown]
# ## The noise in a gradient


# %% name="noise"
def flat_gradient(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    loss = cross_entropy(model(inputs), labels)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def noise_scale(model: nn.Module) -> tuple[float, Tensor]:
    """Sum of the variances of one sample's gradient, over the squared length of the mean."""
    inputs, labels = training_points
    mean = flat_gradient(model, inputs, labels).double()
    squares = 0.0
    for i in range(SAMPLES):
        squares += flat_gradient(model, inputs[i : i + 1], labels[i : i + 1]).square().sum().item()
    variance = squares / SAMPLES - mean.square().sum().item()
    return variance / mean.square().sum().item(), mean


def distance(model: nn.Module, mean: Tensor, batch: int) -> float:
    """How far batch gradients are from the mean of all samples, in lengths of that mean."""
    squared = []
    for _ in range(40):
        chosen = torch.randint(SAMPLES, (batch,))
        gradient = flat_gradient(model, training_points[0][chosen], training_points[1][chosen])
        squared.append((gradient - mean).square().sum() / mean.square().sum())
    return math.sqrt(statistics.mean(value.item() for value in squared))


torch.manual_seed(0)
untrained = classifier(0)
trained, _ = RULES["same rate"](0, 1)
(scale_start, mean_start), (scale_end, _) = noise_scale(untrained), noise_scale(trained)
rows = []
for batch in (8, 32, 128, 512):
    measured_distance = distance(untrained, mean_start, batch)
    formula = math.sqrt(scale_start / batch)
    rows.append([batch, f"{measured_distance:.2f}", f"{formula:.2f}"])
    assert abs(measured_distance / formula - 1) < 0.25
assert scale_end > scale_start
assert 4 * BASE < scale_end < FACTORS[-1] * BASE, "the rule holds below and ends above"
record(
    noise_start=scale_start,
    noise_end=scale_end,
    batch_4=4 * BASE,
    batch_most=FACTORS[-1] * BASE,
)
table(rows, ["batch", "distance, measured", "√(noise scale / batch)"], "rrr")
