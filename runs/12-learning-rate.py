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
# difference. Eight trainings go on at once, in processes that send each other nothing.

# %% name="task"
SEQUENCES = 1024
TOKENS = LENGTH - 1  # of a sequence, that are predicted
BATCHES = [4, 16, 64]  # sequences
WARM = 1 / 8  # of the steps
HELD_OUT = 128  # sequences
AT_A_TIME = 8
Texts = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Pass:
    """What to train with: sequences in a batch, rate, part of the steps to warm up."""

    batch: int
    rate: float
    warm: float = WARM


def train(chosen: Pass, texts: Texts) -> tuple[list[float], float, nn.Module]:
    """The loss of each batch, the loss on held-out text (infinite if it is none), the model."""
    train_text, test_text = texts
    order = torch.randperm(len(train_text), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = build_language_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=chosen.rate)
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
    """Every eighth one of them."""
    torch.set_num_threads(1)
    texts = load_text()
    return [train(chosen, texts)[:2] for chosen in passes[rank::AT_A_TIME]]


# %% name="sweep" ranks="1"
RATES = {
    4: [0.0005, 0.001, 0.002, 0.004],
    16: [0.001, 0.002, 0.004, 0.008, 0.016],
    64: [0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064],
}
passes = [Pass(batch, rate) for batch, rates in RATES.items() for rate in rates]
AT_ONCE = Pass(64, 0.008, warm=0)
passes.append(AT_ONCE)
results: dict[Pass, tuple[list[float], float]] = {}
for rank, found in enumerate(run_ranks(train_some, AT_A_TIME, passes, backend=None, timeout=7200)):
    results.update(zip(passes[rank::AT_A_TIME], found, strict=True))


def loss_of(batch: int, rate: float) -> float:
    return results[Pass(batch, rate)][1]


def best_rate(batch: int) -> float:
    return min(RATES[batch], key=lambda rate: loss_of(batch, rate))


tuned = best_rate(BATCHES[0])


def by_rule(rule: Any, batch: int) -> float:
    """The rate that a rule makes of the best one of the smallest batch."""
    return rule(tuned, BATCHES[0], batch)


# %% name="same-rate" ranks="1"
table(
    [
        [
            batch // BATCHES[0],
            f"{batch * TOKENS:,}",
            SEQUENCES // batch,
            f"{loss_of(batch, tuned):.2f}",
        ]
        for batch in BATCHES
    ],
    ["ranks", "tokens in a batch", "steps", "loss"],
    "rrrr",
)

# %% name="rates" ranks="1"
fig, axes = plt.subplots()
for color, dash, (batch, rates) in zip(RANK_COLORS, ("-", "--", ":"), RATES.items(), strict=False):
    losses = [loss_of(batch, rate) for rate in rates]
    axes.plot(rates, losses, dash, color=color, marker=".", label=f"{batch * TOKENS:,} tokens")
    for rule, marker in ((square_root_scaling, "o"), (linear_scaling, "s")):
        rate = by_rule(rule, batch)
        if batch > BATCHES[0] and rate in rates:
            place = (rate, loss_of(batch, rate))
            axes.plot(*place, marker, markersize=11, fillstyle="none", color=color)
axes.set_xscale("log", base=2)
axes.set_xticks(RATES[64], labels=[f"{1e3 * rate:g}" for rate in RATES[64]])
axes.set(xlabel="rate, in thousandths (○ rule √k, □ rule k)", ylabel="held-out loss")
axes.legend()
figure(fig)

# %% name="rates-values" ranks="1"
root = {batch: by_rule(square_root_scaling, batch) for batch in BATCHES}
linear = {batch: by_rule(linear_scaling, batch) for batch in BATCHES}
assert tuned not in (RATES[4][0], RATES[4][-1]), "the base is tuned"
for batch in BATCHES[1:]:
    rates = RATES[batch]
    assert rates[0] < root[batch] < linear[batch] < rates[-1], "beyond both rules"
record(
    tokens=SEQUENCES * TOKENS,
    tokens_4=4 * TOKENS,
    tokens_16=16 * TOKENS,
    tokens_64=64 * TOKENS,
    steps_64=SEQUENCES // 64,
    rate_4=1e3 * tuned,
    rate_16=1e3 * best_rate(16),
    rate_64=1e3 * best_rate(64),
    root_16=1e3 * root[16],
    root_64=1e3 * root[64],
    linear_16=1e3 * linear[16],
    linear_64=1e3 * linear[64],
    loss_4=loss_of(4, tuned),
    same_16=loss_of(16, tuned),
    same_64=loss_of(64, tuned),
    loss_root_16=loss_of(16, root[16]),
    loss_root_64=loss_of(64, root[64]),
    loss_linear_16=loss_of(16, linear[16]),
    loss_linear_64=loss_of(64, linear[64]),
    best_16=loss_of(16, best_rate(16)),
    best_64=loss_of(64, best_rate(64)),
)

# %% [markdown]
# ## Warm-up

# %% name="start" ranks="1"
at_once = results[AT_ONCE][0]
warmed = results[Pass(AT_ONCE.batch, AT_ONCE.rate)][0]
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
    end_warmed=loss_of(AT_ONCE.batch, AT_ONCE.rate),
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
        if chosen.batch == batch
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
# The hook of the chapter's program in plain torch, on two ranks, before training.

# %% name="noise" ranks="2"
PER_RANK = 8  # sequences
DRAWS = 30


def measure_noise(rank: int) -> float:
    """In tokens. Nothing is learned meanwhile."""
    torch.set_num_threads(1)
    program = runpy.run_path("runs/pytorch/12_learning_rate.py")
    train_text, _ = load_text()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(build_language_model())
    noise_scale = program["NoiseScale"](ddp)
    torch.manual_seed(rank)
    for _ in range(DRAWS):
        batch = train_text[torch.randint(len(train_text), (PER_RANK,))]
        ddp(input_ids=batch, labels=batch).loss.backward()
        ddp.zero_grad()
    return noise_scale.in_samples(PER_RANK) * TOKENS


noise = run_ranks(measure_noise, 2, timeout=3600)[0]
record(noise=noise, noise_per_rank=PER_RANK, noise_steps=DRAWS)
