# %% [markdown]
# # Learning rate and batch
#
# More ranks mean a larger batch and fewer steps. What that does to the stages' language model,
# which reads the same part of their text with several batches, and each of them with several rates.

# %% name="setup"
import math
import runpy
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from book import LINE, MUTED, RANK_COLORS, figure, provenance, record, table
from instruments.learning_rate import linear_scaling, square_root_scaling
from instruments.noise_scale import fit_steps
from miniddp import run_ranks
from shakespeare import LENGTH, build_language_model, load_text

provenance(device="cpu", world_size=[1, 2], backend="gloo")

# %% [markdown]
# ## One pass
#
# Every training reads the same 1,024 sequences once, in the same order, and warms up for an eighth
# of its steps. One process with the global batch stands in for the ranks: the optimizer sees no
# difference. Four trainings go on at once, in processes that send each other nothing.

# %% name="task"
SEQUENCES = 1024
TOKENS = LENGTH - 1  # of a sequence, that are predicted
BATCHES = [4, 16, 64]  # sequences
WARM = 1 / 8  # of the steps
HELD_OUT = 128  # sequences
AT_A_TIME = 4
Texts = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Pass:
    """What to train with: optimizer, sequences in a batch, rate, part of the steps to warm up."""

    optimizer: str
    batch: int
    rate: float
    warm: float = WARM


def train(chosen: Pass, texts: Texts) -> tuple[list[float], float, nn.Module]:
    """The loss of each batch, the loss on held-out text (infinite if it is none), the model."""
    train_text, test_text = texts
    order = torch.randperm(len(train_text), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = build_language_model()
    optimizer = getattr(torch.optim, chosen.optimizer)(model.parameters(), lr=chosen.rate)
    batches = order[:SEQUENCES].split(chosen.batch)
    warmup = int(chosen.warm * len(batches))
    losses = []
    for step, positions in enumerate(batches, start=1):
        optimizer.param_groups[0]["lr"] = chosen.rate * min(1, step / (warmup + 1))
        batch = train_text[positions]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        held_out = test_text[:HELD_OUT]
        loss = model(input_ids=held_out, labels=held_out).loss.item()
    return losses, loss if math.isfinite(loss) else math.inf, model


def train_some(rank: int, passes: list[Pass]) -> list[tuple[list[float], float]]:
    """Every fourth one of them."""
    torch.set_num_threads(1)
    texts = load_text()
    return [train(chosen, texts)[:2] for chosen in passes[rank::AT_A_TIME]]


# %% name="sweep" ranks="1"
RATES = {
    "AdamW": {
        4: [0.0005, 0.001, 0.002, 0.004],
        16: [0.001, 0.002, 0.004, 0.008, 0.016],
        64: [0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064],
    },
    "SGD": {4: [0.05, 0.1, 0.2, 0.4], 16: [0.1, 0.2, 0.4, 0.8, 1.6]},
}
passes = [
    Pass(optimizer, batch, rate)
    for optimizer, rates_of in RATES.items()
    for batch, rates in rates_of.items()
    for rate in rates
]
AT_ONCE = Pass("AdamW", 64, 0.008, warm=0)
passes.append(AT_ONCE)
results: dict[Pass, tuple[list[float], float]] = {}
for rank, found in enumerate(run_ranks(train_some, AT_A_TIME, passes, backend=None, timeout=7200)):
    results.update(zip(passes[rank::AT_A_TIME], found, strict=True))


def loss_of(optimizer: str, batch: int, rate: float) -> float:
    return results[Pass(optimizer, batch, rate)][1]


def best_rate(optimizer: str, batch: int) -> float:
    return min(RATES[optimizer][batch], key=lambda rate: loss_of(optimizer, batch, rate))


def by_rule(rule: Any, optimizer: str, batch: int) -> float:
    """The rate that a rule makes of the best one of the smallest batch."""
    return rule(best_rate(optimizer, BATCHES[0]), BATCHES[0], batch)


# %% name="same-rate" ranks="1"
tuned = best_rate("AdamW", BATCHES[0])
table(
    [
        [
            batch // BATCHES[0],
            f"{batch * TOKENS:,}",
            SEQUENCES // batch,
            f"{loss_of('AdamW', batch, tuned):.2f}",
        ]
        for batch in BATCHES
    ],
    ["ranks", "tokens in a batch", "steps", "loss"],
    "rrrr",
)

# %% name="rates" ranks="1"
RULES = {"√k": (square_root_scaling, "o"), "k": (linear_scaling, "s")}
fig, all_axes = plt.subplots(2, 1, figsize=(6.4, 7), sharey=False)
for axes, (optimizer, rates_of) in zip(all_axes, reversed(RATES.items()), strict=True):
    for color, dash, (batch, rates) in zip(
        RANK_COLORS, ("-", "--", ":"), rates_of.items(), strict=False
    ):
        losses = [loss_of(optimizer, batch, rate) for rate in rates]
        axes.plot(rates, losses, dash, color=color, marker=".", label=f"{batch * TOKENS:,} tokens")
        for rule, marker in RULES.values():
            rate = by_rule(rule, optimizer, batch)
            if batch > BATCHES[0] and rate in rates:
                at = (rate, loss_of(optimizer, batch, rate))
                axes.plot(*at, marker, markersize=11, fillstyle="none", color=color)
    axes.set_xscale("log", base=2)
    ticks = sorted({rate for rates in rates_of.values() for rate in rates})
    axes.set_xticks(ticks, labels=[f"{rate:g}" for rate in ticks])
    axes.set(ylabel="held-out loss", title=optimizer)
    axes.legend()
all_axes[-1].set_xlabel("learning rate (○ by the rule √k, □ by the rule k)")
figure(fig)

# %% name="rates-values" ranks="1"
for optimizer, rates_of in RATES.items():
    rates = rates_of[BATCHES[0]]
    assert best_rate(optimizer, BATCHES[0]) not in (rates[0], rates[-1]), "the base is tuned"
adam = {batch: best_rate("AdamW", batch) for batch in BATCHES}
root = {batch: by_rule(square_root_scaling, "AdamW", batch) for batch in BATCHES}
linear = {batch: by_rule(linear_scaling, "AdamW", batch) for batch in BATCHES}
sgd_linear = by_rule(linear_scaling, "SGD", 16)
for batch in BATCHES[1:]:
    rates = RATES["AdamW"][batch]
    assert rates[0] < root[batch] < linear[batch] < rates[-1], "beyond both rules"
assert RATES["SGD"][16][0] < sgd_linear < RATES["SGD"][16][-1], "beyond the linear rule"
record(
    sequences=SEQUENCES,
    tokens=SEQUENCES * TOKENS,
    tokens_4=4 * TOKENS,
    tokens_16=16 * TOKENS,
    tokens_64=64 * TOKENS,
    steps_4=SEQUENCES // 4,
    steps_16=SEQUENCES // 16,
    steps_64=SEQUENCES // 64,
    adam_rate_4=1e3 * adam[4],
    adam_rate_16=1e3 * adam[16],
    adam_rate_64=1e3 * adam[64],
    root_16=1e3 * root[16],
    root_64=1e3 * root[64],
    linear_16=1e3 * linear[16],
    linear_64=1e3 * linear[64],
    loss_4=loss_of("AdamW", 4, adam[4]),
    same_16=loss_of("AdamW", 16, tuned),
    same_64=loss_of("AdamW", 64, tuned),
    loss_root_16=loss_of("AdamW", 16, root[16]),
    loss_root_64=loss_of("AdamW", 64, root[64]),
    loss_linear_16=loss_of("AdamW", 16, linear[16]),
    loss_linear_64=loss_of("AdamW", 64, linear[64]),
    best_16=loss_of("AdamW", 16, adam[16]),
    best_64=loss_of("AdamW", 64, adam[64]),
    sgd_rate_4=best_rate("SGD", 4),
    sgd_rate_16=best_rate("SGD", 16),
    sgd_linear=sgd_linear,
    sgd_loss_4=loss_of("SGD", 4, best_rate("SGD", 4)),
    sgd_same_16=loss_of("SGD", 16, best_rate("SGD", 4)),
    sgd_loss_linear=loss_of("SGD", 16, sgd_linear),
    sgd_best_16=loss_of("SGD", 16, best_rate("SGD", 16)),
)

# %% [markdown]
# ## Warm-up

# %% name="start" ranks="1"
at_once = results[AT_ONCE][0]
warmed = results[Pass(AT_ONCE.optimizer, AT_ONCE.batch, AT_ONCE.rate)][0]
fig, axes = plt.subplots()
axes.plot(range(1, len(at_once) + 1), at_once, "C1--", label="full rate at once")
axes.plot(range(1, len(warmed) + 1), warmed, "C2", label="warm-up")
axes.set(xlabel="step", ylabel="loss of the batch")
axes.legend()
figure(fig)
record(
    start_rate=1e3 * AT_ONCE.rate,
    first_loss=at_once[0],
    peak_at_once=max(at_once),
    peak_warmed=max(warmed),
    end_at_once=results[AT_ONCE][1],
    end_warmed=loss_of(AT_ONCE.optimizer, AT_ONCE.batch, AT_ONCE.rate),
)

# %% [markdown]
# ## The steps to a loss
#
# Nothing is read twice, so the loss of the next batches is that of text that the model has not
# seen. The loss is reached when the mean over 64 sequences is down at it. The best rate counts.

# %% name="steps" ranks="1"
TARGET = 5.8


def steps_to_target(losses: list[float], batch: int) -> float:
    window = 64 // batch
    for end in range(window, len(losses) + 1):
        if sum(losses[end - window : end]) / window <= TARGET:
            return float(end)
    return math.inf


def fewest_steps(batch: int) -> float:
    return min(
        steps_to_target(losses, batch)
        for chosen, (losses, _) in results.items()
        if chosen.optimizer == "AdamW" and chosen.batch == batch
    )


steps = [fewest_steps(batch) for batch in BATCHES]
tokens = [batch * TOKENS for batch in BATCHES]
fewest, critical = fit_steps(tokens, steps)
assert steps[0] > steps[1] > steps[2]

fig, axes = plt.subplots()
axes.plot(tokens, steps, "o", color="C0", label="measured")
between = torch.logspace(math.log2(tokens[0]), math.log2(tokens[-1]), 50, base=2)
axes.plot(between, fewest * (1 + critical / between), "-", label="fitted")
axes.plot(
    tokens,
    [steps[0] * tokens[0] / batch for batch in tokens],
    ":",
    color=MUTED,
    label="a quarter for four times the batch",
)
axes.axvline(critical, color=LINE, linewidth=1)
axes.annotate("  critical batch", (critical, steps[0]), color=MUTED)
axes.set_xscale("log", base=2)
axes.set_yscale("log", base=2)
axes.set_xticks(tokens, labels=[f"{batch:,}" for batch in tokens])
axes.set_yticks([4, 8, 16, 32, 64], labels=["4", "8", "16", "32", "64"])
axes.set(xlabel="tokens in a batch", ylabel=f"steps to a loss of {TARGET}")
axes.legend()
figure(fig)
record(
    target=TARGET,
    critical=critical,
    to_target_4=steps[0],
    to_target_16=steps[1],
    to_target_64=steps[2],
    more_tokens=64 * steps[2] / (16 * steps[1]),
    fewer_steps=steps[1] / steps[2],
)

# %% [markdown]
# ## The noise in a gradient
#
# The hook of the chapter's program in plain torch, on two ranks, before training and after a pass.

# %% name="noise" ranks="2"
PER_RANK = 8  # sequences
DRAWS = 24


def measure_noise(rank: int, weights: dict[str, torch.Tensor] | None) -> float:
    """In tokens. Nothing is learned meanwhile."""
    torch.set_num_threads(1)
    program = runpy.run_path("runs/pytorch/12_learning_rate.py")
    train_text, _ = load_text()
    torch.manual_seed(0)
    model = build_language_model()
    if weights is not None:
        model.load_state_dict(weights)
    ddp = DistributedDataParallel(model)
    noise_scale = program["NoiseScale"](ddp)
    torch.manual_seed(rank)
    for _ in range(DRAWS):
        batch = train_text[torch.randint(len(train_text), (PER_RANK,))]
        ddp(input_ids=batch, labels=batch).loss.backward()
        ddp.zero_grad()
    return noise_scale.in_samples(PER_RANK) * TOKENS


torch.set_num_threads(1)
_, _, trained = train(Pass("AdamW", 4, tuned), load_text())
weights = {name: weight.clone() for name, weight in trained.state_dict().items()}
at_start = run_ranks(measure_noise, 2, None, backend="gloo", timeout=3600)[0]
at_end = run_ranks(measure_noise, 2, weights, backend="gloo", timeout=3600)[0]
print(f"before training: {at_start:,.0f} tokens")
print(f"after one pass:  {at_end:,.0f} tokens")
assert at_end > at_start > 0
record(
    noise_start=at_start,
    noise_end=at_end,
    noise_per_rank=PER_RANK,
    noise_steps=DRAWS,
)
