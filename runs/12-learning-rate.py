# %% [markdown]
# # Learning rate and batch
#
# More ranks mean a larger batch and fewer steps. What that does to a small classifier, which trains
# in a second and so can be trained with many batches, rates and initial weights.

# %% name="setup"
import math
import statistics
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from book import LINE, MUTED, figure, provenance, record, table
from instruments.learning_rate import linear_scaling, square_root_scaling, warmup

provenance(device="cpu", world_size=1, backend=None)
torch.set_num_threads(1)

# %% [markdown]
# ## A classifier, with SGD
#
# It learns from noisy labels, and every training sees the same samples once. One process with the
# joined batch stands in for the ranks: the optimizer sees no difference.

# %% name="task"
INPUTS, CLASSES, HIDDEN, SAMPLES, BASE, SEEDS = 32, 10, 64, 8192, 8, 3
RATE = 0.05


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


@cache  # the rules agree on the base batch
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

# %% name="sgd"
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
Rule = Callable[[int, int], tuple[nn.Module, list[float]]]


def loss_of(rule: Rule, k: int) -> float:
    return statistics.mean(min(GUESSING, test_loss(rule(seed, k)[0])) for seed in range(SEEDS))


def loss_at(times: int, k: int) -> float:
    """With so many times the rate, without a warm-up."""
    return loss_of(lambda seed, k: train(torch.optim.SGD, seed, k * BASE, times * RATE), k)


sgd = {name: [loss_of(rule, k) for k in FACTORS] for name, rule in RULES.items()}
same, linear, warm = sgd.values()
between = [{times: loss_at(times, k) for times in FACTORS if times <= k} for k in FACTORS]
best = [min(losses.values()) for losses in between]
assert same[2] - same[0] > 3 * abs(linear[2] - linear[0]), "at 4 times the batch the rule helps"
assert linear[-1] - linear[0] > 0.2, "at 64 times the batch it does not keep up"
assert best[:5] == linear[:5], "up to 16 times the batch no rate tried is better than the rule's"

# %% name="same-rate"
table(
    [
        [k, k * BASE, SAMPLES // (k * BASE), f"{loss:.2f}"]
        for k, loss in zip(FACTORS, same, strict=True)
        if k in (1, 4, 16, 64)
    ],
    ["ranks", "batch", "steps", "loss"],
    "rrrr",
)

# %% name="rates"
fig, axes = plt.subplots()
styles = [("-", "o"), ("--", "s"), (":", "^"), ("-.", "D")]
lines = {**sgd, "best rate": best}
for (name, losses), (dash, marker) in zip(lines.items(), styles, strict=True):
    axes.plot(FACTORS, losses, dash, marker=marker, label=name)
axes.axhline(GUESSING, color=LINE, linewidth=1)
above = {"xytext": (0, 4), "textcoords": "offset points", "color": MUTED}
axes.annotate("guessing", (FACTORS[-1], GUESSING), ha="right", **above)
axes.margins(y=0.12)
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
    loss_linear_8=linear[3],
    loss_warm_8=warm[3],
    loss_linear_32=linear[5],
    loss_warm_32=warm[5],
    loss_best_32=best[5],
    loss_best_most=best[6],
    best_times_32=min(between[5], key=between[5].get),
    best_times_most=min(between[6], key=between[6].get),
)


# %% name="start"
AT = 32
plain_losses = RULES["rate × k"](0, AT)[1]
warm_losses = RULES["rate × k, warm-up"](0, AT)[1]
first = plain_losses[0]
assert max(plain_losses) > 1.2 * first, "without warm-up the loss jumps"
assert max(warm_losses) < max(plain_losses)
record(start_factor=AT, first_loss=first, peak_plain=max(plain_losses), peak_warm=max(warm_losses))

fig, axes = plt.subplots()
axes.plot(plain_losses, "C1--", label="rate × k")
axes.plot(warm_losses, "C2:", label="rate × k, warm-up")
axes.set(xlabel="step", ylabel="loss of the batch", ylim=(0, None))
axes.legend()
figure(fig)

# %% [markdown]
# ## The same classifier, with Adam
#
# A rule about rates can only be tested if each batch has been tuned. So every batch trains with
# every rate.

# %% name="adam"
ADAM_RATES = [5e-4 * 2**i for i in range(7)]
ADAM_FACTOR = 16


def adam_losses(k: int, rates: list[float]) -> list[float]:
    return [
        statistics.mean(
            test_loss(train(torch.optim.Adam, seed, k * BASE, rate)[0]) for seed in range(SEEDS)
        )
        for rate in rates
    ]


def best_rate(losses: list[float]) -> float:
    return ADAM_RATES[losses.index(min(losses))]


adam = {k: adam_losses(k, ADAM_RATES) for k in (1, ADAM_FACTOR)}
tuned, grown = (best_rate(losses) for losses in adam.values())
guess = square_root_scaling(tuned, BASE, ADAM_FACTOR * BASE)
assert tuned not in (ADAM_RATES[0], ADAM_RATES[-1]), "the base batch is tuned"
assert abs(math.log2(grown / guess)) <= 1, "the rule leads to a neighbour of the best rate"
table(
    [
        [f"{1e3 * rate:g}", *(f"{losses[i]:.2f}" for losses in adam.values())]
        for i, rate in enumerate(ADAM_RATES)
    ],
    ["rate, thousandths", *(f"batch {k * BASE}" for k in adam)],
    "rrr",
)

# %% name="adam-values"
at = dict(zip(ADAM_RATES, adam[ADAM_FACTOR], strict=True))
record(
    adam_factor=ADAM_FACTOR,
    adam_batch=ADAM_FACTOR * BASE,
    adam_tuned=1e3 * tuned,
    adam_guess=1e3 * guess,
    adam_best=1e3 * grown,
    adam_loss=min(adam[1]),
    adam_same=at[tuned],
    adam_square_root=at[guess],
    adam_linear=at[linear_scaling(tuned, BASE, ADAM_FACTOR * BASE)],
)

# %% [markdown]
# ## The noise in a gradient


# %% name="noise"
NOISE_RANKS, NOISE_STEPS = 4, 200


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


def noise_of_ranks(model: nn.Module, ranks: int, steps: int) -> float:
    """The noise scale from what DDP has at hand: each rank's gradient, and the mean."""
    own, joined = [], []
    for _ in range(steps):
        parts = torch.randint(SAMPLES, (ranks, BASE))
        gradients = torch.stack(
            [flat_gradient(model, training_points[0][i], training_points[1][i]) for i in parts]
        )
        own.append(gradients.square().sum(1).mean().item())
        joined.append(gradients.mean(0).square().sum().item())
    small, large = statistics.mean(own), statistics.mean(joined)
    variance = (small - large) / (1 / BASE - 1 / (ranks * BASE))
    return variance / (small - variance / BASE)


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
of_ranks = noise_of_ranks(untrained, NOISE_RANKS, NOISE_STEPS)
assert abs(of_ranks / scale_start - 1) < 0.3
assert 4 * BASE < scale_end < FACTORS[-1] * BASE, "the rule holds below and ends above"
record(
    noise_start=scale_start,
    noise_end=scale_end,
    noise_of_ranks=of_ranks,
    noise_ranks=NOISE_RANKS,
    noise_steps=NOISE_STEPS,
    batch_4=4 * BASE,
    batch_most=FACTORS[-1] * BASE,
)
table(rows, ["batch", "distance, measured", "√(noise scale / batch)"], "rrr")

# %% [markdown]
# ## The steps to a loss
#
# Every batch trains with five rates, always on samples that it has not seen, until the loss on
# other samples has fallen to the target. The best of the rates counts.

# %% name="steps"
TARGET, RATES = 1.45, [0.05 * 2**i for i in range(5)]
BATCHES = [BASE * 2**i for i in range(8)]
fresh_points = points(2**16, 3)


def steps_to_target(seed: int, batch: int, rate: float, most: float) -> float:
    model = classifier(seed)
    optim = torch.optim.SGD(model.parameters(), lr=rate)
    pairs = list(zip(*(each.split(batch) for each in fresh_points), strict=True))
    step = 0
    while step < most:
        inputs, labels = pairs[step % len(pairs)]
        cross_entropy(model(inputs), labels).backward()
        optim.step()
        optim.zero_grad()
        step += 1
        if step % 4 == 0 and test_loss(model) <= TARGET:
            return step
    return math.inf


def fewest_steps(batch: int) -> float:
    """With the best rate. One that takes twice as long as another is given up."""
    best = 1000.0
    for rate in reversed(RATES):
        taken = [steps_to_target(seed, batch, rate, 2 * best) for seed in range(SEEDS)]
        best = min(best, statistics.mean(taken))
    return best


steps = [fewest_steps(batch) for batch in BATCHES]

# %% [markdown]
# The curve `fewest * (1 + critical / batch)` that comes nearest to them, by relative distances.

# %% name="steps-figure"
taken = torch.tensor(steps).unsqueeze(1)
terms = torch.tensor([[1, 1 / batch] for batch in BATCHES]) / taken
fewest, slope = torch.linalg.lstsq(terms, torch.ones_like(taken)).solution.flatten().tolist()
critical = slope / fewest
assert scale_start / 2 < critical < 2 * scale_end, "the noise in the gradients predicts it"

fig, axes = plt.subplots()
axes.plot(BATCHES, steps, "o", color="C0", label="measured")
between = torch.logspace(math.log2(BATCHES[0]), math.log2(BATCHES[-1]), 50, base=2)
axes.plot(between, fewest * (1 + critical / between), "-", label="fitted")
halved = [steps[0] * BASE / batch for batch in BATCHES]
axes.plot(BATCHES, halved, ":", color=MUTED, label="half for double the batch")
axes.axvline(critical, color=LINE, linewidth=1)
axes.annotate("  critical batch", (critical, steps[0]), color=MUTED)
axes.set_xscale("log", base=2)
axes.set_yscale("log", base=2)
axes.set_xticks(BATCHES, labels=[str(b) for b in BATCHES])
axes.set_yticks([16, 32, 64, 128, 256, 512], labels=["16", "32", "64", "128", "256", "512"])
axes.set(xlabel="batch", ylabel="steps to the loss", ylim=(12, None))
axes.legend()
figure(fig)
by_batch = dict(zip(BATCHES, steps, strict=True))
record(
    target=TARGET,
    rates=len(RATES),
    critical=critical,
    fewest=fewest,
    steps_8=by_batch[8],
    steps_64=by_batch[64],
    steps_512=by_batch[512],
    samples_64=64 * by_batch[64],
    samples_512=512 * by_batch[512],
    fewer_steps=by_batch[64] / by_batch[512],
    more_samples=512 * by_batch[512] / (64 * by_batch[64]),
)
