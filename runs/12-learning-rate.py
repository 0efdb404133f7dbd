# %% [markdown]
# # Learning rate and batch
#
# More ranks mean a larger batch and fewer steps. What that does to a small classifier, which trains
# in a second and so can be trained with many batches, rates and initial weights.

# %% name="setup"
import math
import statistics
from collections.abc import Callable
from functools import cache

import matplotlib.pyplot as plt
import torch
from torch import nn

from book import LINE, MUTED, figure, provenance, record, table
from instruments.classifier import (
    GUESSING,
    classifier,
    evaluate,
    noisy_samples,
    steps_until,
    train,
)
from instruments.learning_rate import linear_scaling, square_root_scaling, warmup
from instruments.noise_scale import distance, fit_steps, noise_of, noise_of_ranks

provenance(device="cpu", world_size=1, backend=None)
torch.set_num_threads(1)

# %% [markdown]
# ## A classifier, with SGD
#
# It learns from noisy labels, and every training sees the same samples once. One process with the
# joined batch stands in for the ranks: the optimizer sees no difference.

# %% name="task"
BASE = 8
SEEDS = 3
RATE = 0.05
training_samples = noisy_samples(8192, seed=1)
held_out = noisy_samples(4000, seed=2)
SAMPLES = len(training_samples)
Trained = tuple[nn.Module, list[float]]


@cache  # the rules agree on the base batch
def trained(
    optimizer: type, seed: int, batch: int, rate: float, warmup_steps: int = 0, start: float = 0
) -> Trained:
    """One pass over the samples: the model, and the loss of each batch."""
    model = classifier(seed)
    losses = train(
        model,
        optimizer(model.parameters(), lr=rate),
        training_samples.shuffled(batch, seed),
        lambda step: warmup(step, warmup_steps, start, rate),
    )
    return model, losses


# %% name="sgd"
FACTORS = [1, 2, 4, 8, 16, 32, 64]
WARM = 0.2  # of the steps


def with_rate(seed: int, k: int, times: int = 1) -> Trained:
    """With k times the batch, and so many times the rate."""
    return trained(torch.optim.SGD, seed, k * BASE, times * RATE)


def with_linear_rate(seed: int, k: int, warm: float = 0) -> Trained:
    """The same with the rate of the rule, after a warm-up of a part of the steps."""
    rate = linear_scaling(RATE, BASE, k * BASE)
    if not warm:
        return trained(torch.optim.SGD, seed, k * BASE, rate)
    warmup_steps = int(warm * SAMPLES / (k * BASE))
    return trained(torch.optim.SGD, seed, k * BASE, rate, warmup_steps, RATE)


RULES = {
    "same rate": with_rate,
    "rate × k": with_linear_rate,
    "rate × k, warm-up": lambda seed, k: with_linear_rate(seed, k, WARM),
}
Rule = Callable[[int, int], Trained]


def loss_of(rule: Rule, k: int) -> float:
    """The mean over the seeds; a loss worse than guessing counts as guessing."""
    losses = [evaluate(rule(seed, k)[0], held_out) for seed in range(SEEDS)]
    return statistics.mean(min(GUESSING, loss) for loss in losses)


def loss_at(times: int, k: int) -> float:
    """With so many times the rate, without a warm-up."""
    return loss_of(lambda seed, k: with_rate(seed, k, times), k)


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
    steps_most=SAMPLES // (BASE * FACTORS[-1]),
    loss_base=same[0],
    loss_same_4=same[2],
    loss_linear_4=linear[2],
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
            evaluate(trained(torch.optim.Adam, seed, k * BASE, rate)[0], held_out)
            for seed in range(SEEDS)
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
    adam_tuned=1e3 * tuned,
    adam_guess=1e3 * guess,
    adam_best=1e3 * grown,
    adam_same=at[tuned],
    adam_square_root=at[guess],
    adam_linear=at[linear_scaling(tuned, BASE, ADAM_FACTOR * BASE)],
)

# %% [markdown]
# ## The noise in a gradient

# %% name="noise"
NOISE_RANKS = 4
NOISE_STEPS = 200
torch.manual_seed(0)
untrained = classifier(0)
after_a_pass, _ = with_rate(0, 1)
at_start = noise_of(untrained, training_samples)
at_end = noise_of(after_a_pass, training_samples)
rows = []
for batch in (8, 32, 128, 512):
    measured = distance(untrained, training_samples, at_start.mean, batch)
    formula = math.sqrt(at_start.scale / batch)
    rows.append([batch, f"{measured:.2f}", f"{formula:.2f}"])
    assert abs(measured / formula - 1) < 0.25
assert at_end.scale > at_start.scale
of_ranks = noise_of_ranks(untrained, training_samples, NOISE_RANKS, BASE, NOISE_STEPS)
assert abs(of_ranks / at_start.scale - 1) < 0.3
assert 4 * BASE < at_end.scale < FACTORS[-1] * BASE, "the rule holds below and ends above"
record(
    noise_start=at_start.scale,
    noise_end=at_end.scale,
    noise_of_ranks=of_ranks,
    noise_ranks=NOISE_RANKS,
    noise_steps=NOISE_STEPS,
)
table(rows, ["batch", "distance, measured", "√(noise scale / batch)"], "rrr")

# %% [markdown]
# ## The steps to a loss
#
# Every batch trains with five rates, always on samples that it has not seen, until the loss on
# other samples has fallen to the target. The best of the rates counts.

# %% name="steps"
TARGET = 1.45
RATES = [0.05 * 2**i for i in range(5)]
BATCHES = [BASE * 2**i for i in range(8)]
fresh_samples = noisy_samples(2**16, seed=3)


def steps_to_target(seed: int, batch: int, rate: float, most: float) -> float:
    model = classifier(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    batches = fresh_samples.split(batch)
    return steps_until(TARGET, model, optimizer, batches, held_out, most)


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
fewest, critical = fit_steps(BATCHES, steps)
assert at_start.scale / 2 < critical < 2 * at_end.scale, "the noise in the gradients predicts it"

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
    steps_8=by_batch[8],
    steps_64=by_batch[64],
    steps_512=by_batch[512],
    fewer_steps=by_batch[64] / by_batch[512],
    more_samples=512 * by_batch[512] / (64 * by_batch[64]),
)
