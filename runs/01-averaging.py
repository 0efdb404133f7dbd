# %% [markdown]
# # Why averaging works
#
# The program of the first page compares itself with one process, on two ranks and on five. Then a
# small classifier that one process and 2, 3 and 4 ranks train on the same samples: are the weights
# the same? Last, cases in which the mean of the ranks is not the gradient of the joined batch.

# %% name="setup"
import math
import re

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import miniddp
from book import FOREGROUND, MUTED, RANK_COLORS, figure, provenance, record, table
from instruments.equivalence import (
    OPTIMIZERS,
    SAMPLES,
    STEPS,
    WIDTH,
    gaps_between,
    gradient_alone,
    gradient_on_rank,
    scatter_with_dropout,
    train_alone,
    train_on_rank,
)
from instruments.first_batch import gradients, gradients_all_in_float64
from instruments.gradients import largest_difference, relative_error
from instruments.programs import run_python, run_torchrun, step_losses
from miniddp.process import device

WORLD_SIZES = [2, 3, 4]
provenance(device=device(), world_size=[2, 3, 4, 5], backend="gloo")

# %% [markdown]
# ## The program of the first page, against one process
#
# Its batch has 36 sequences. Two ranks divide it, five do not.


# %% name="stage" ranks="2 5"
def off_by(printed: str) -> dict[str, float]:
    """How far the averaged gradient is from one process's, as stage 1 prints it, by dtype."""
    found = re.findall(r"off by (\S+) at most in torch\.(\w+)", printed)
    return {dtype: float(difference) for difference, dtype in found}


one_process = step_losses(run_python("stages/0_one_process.py"))
printed = {ranks: run_torchrun(ranks, "stages/1_average.py") for ranks in (2, 5)}
off = {ranks: off_by(text) for ranks, text in printed.items()}
losses = {ranks: step_losses(text) for ranks, text in printed.items()}
assert off[2]["float64"] < 1e-12 < off[2]["float32"] < 1e-6
assert all(difference > 1e-4 for difference in off[5].values())
last = max(one_process)
rows = [["one process", "", "", f"{one_process[last]:.3f}"]]
for ranks in (2, 5):
    assert abs(losses[ranks][last] / one_process[last] - 1) < 0.01, "the loss does not tell"
    differences = [f"{off[ranks][dtype]:.0e}" for dtype in ("float32", "float64")]
    rows.append([f"{ranks} ranks", *differences, f"{losses[ranks][last]:.3f}"])
table(rows, ["trained on", "off by, float32", "off by, float64", "last loss"], "lrrr")

# %% [markdown]
# All that it prints on two ranks:

# %% name="printed" ranks="2"
print(printed[2], end="")

# %% name="stage-values" ranks="2 5"
record(
    steps_of_stage=last,
    off_two_float32=off[2]["float32"],
    off_five=off[5]["float64"],
    apart=max(abs(loss - losses[2][step]) for step, loss in one_process.items()),
)

# %% [markdown]
# The losses of one process and of two ranks:

# %% name="curves" ranks="2"
fig, axes = plt.subplots(figsize=(5.2, 2.8))
thick = {"linewidth": 7, "alpha": 0.35, "color": RANK_COLORS[0]}
axes.plot(one_process.keys(), one_process.values(), label="one process", **thick)
thin = {"linewidth": 2, "marker": "o", "color": RANK_COLORS[1]}
axes.plot(losses[2].keys(), losses[2].values(), label="two ranks", **thin)
axes.set(xlabel="step", ylabel="loss of the batch")
axes.legend()
figure(fig)

# %% [markdown]
# Three ranks compute in float64, first as the model is, then with its norms and its loss in float64
# too: they compute in float32 whatever the weights are.

# %% name="three" ranks="3"
STAGE = "stages/1_average.py"
off_three = largest_difference(*miniddp.run_ranks(gradients, 3, STAGE, torch.float64)[0])
exact = miniddp.run_ranks(gradients_all_in_float64, 3, STAGE)[0]
off_three_in_float64 = largest_difference(*exact)
assert off_three_in_float64 < 1e-14 < off_three < 1e-7
record(off_three=off_three, off_three_in_float64=off_three_in_float64)

# %% [markdown]
# Five ranks again, each weighed by its share of the batch:

# %% name="five" ranks="5"
mean, whole = miniddp.run_ranks(gradients, 5, STAGE, torch.float32, True)[0]
off_five_weighted = largest_difference(mean, whole)
assert off_five_weighted < 1e-6
record(off_five_weighted=off_five_weighted, largest_element=whole.abs().max().item())

# %% [markdown]
# ## The same training, alone and on ranks
#
# A small classifier of random points: the largest difference of any weight from the one process's,
# after each step.

# %% name="parity" ranks="2 3 4"
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-13}
CASES = [(optimizer, dtype) for optimizer in OPTIMIZERS for dtype in TOLERANCES]
Histories = dict[tuple[str, torch.dtype], list[Tensor]]


def train_all(rank: int) -> Histories:
    return {case: train_on_rank(*case) for case in CASES}


alone: Histories = {case: train_alone(*case) for case in CASES}
gaps: dict[tuple[int, str, torch.dtype], list[float]] = {}
worst = dict.fromkeys(TOLERANCES, 0.0)
for world_size in WORLD_SIZES:
    ranks = miniddp.run_ranks(train_all, world_size)
    for (optimizer, dtype), expected in alone.items():
        found = [of_rank[optimizer, dtype] for of_rank in ranks]
        for history in found[1:]:
            assert all(map(torch.equal, history, found[0])), "ranks stay equal"
        assert largest_difference(expected[-1], expected[0]) > 0.05, "it trains"
        gaps[world_size, optimizer, dtype] = gaps_between(found[0], expected)
        worst[dtype] = max(worst[dtype], *gaps[world_size, optimizer, dtype])
        assert worst[dtype] < TOLERANCES[dtype]
assert worst[torch.float64] * 1e4 < worst[torch.float32]

# %% [markdown]
# PyTorch's own class, which synchronises during backward, on three ranks:


# %% name="parity-values" ranks="2 3 4"
def train_with_torch(rank: int) -> list[Tensor]:
    return train_on_rank("Adam", torch.float64, DistributedDataParallel, lambda model: None)


torch_weights = miniddp.run_ranks(train_with_torch, 3)[0][-1]
torch_gap = largest_difference(torch_weights, alone["Adam", torch.float64][-1])
assert torch_gap < TOLERANCES[torch.float64]
record(
    samples=SAMPLES,
    steps=STEPS,
    parameters=torch_weights.numel(),
    worst_float32=worst[torch.float32],
    worst_float64=worst[torch.float64],
    torch_float64=torch_gap,
)

# %% [markdown]
# ## Rounding, and a mistake
#
# The same three numbers, added in two orders.

# %% name="order"
left, right = (0.1 + 0.2) + 0.3, 0.1 + (0.2 + 0.3)
print("(0.1 + 0.2) + 0.3 =", left)
print("0.1 + (0.2 + 0.3) =", right)
assert left != right

# %% [markdown]
# The gap between three ranks and one process over the training, in both dtypes. For contrast a
# mistake: three ranks that add their gradients and do not divide.


# %% name="gap" ranks="3"
def add_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def train_without_dividing(rank: int) -> Histories:
    return {case: train_on_rank(*case, synchronise=add_gradients) for case in CASES}


undivided = miniddp.run_ranks(train_without_dividing, 3)[0]
fig, axes = plt.subplots()
for dtype, line in ((torch.float32, "-"), (torch.float64, "--")):
    right = gaps[3, "SGD", dtype]
    wrong = gaps_between(undivided["SGD", dtype], alone["SGD", dtype])
    assert min(wrong) > 1e-3, "a mistake does not shrink with the precision"
    steps = range(1, STEPS + 1)
    axes.semilogy(steps, wrong, line, marker="x", color=MUTED)
    axes.semilogy(steps, right, line, marker="o", color=FOREGROUND)
    name = str(dtype).removeprefix("torch.")
    axes.text(STEPS, 30 * max(right), f"mean, {name}", ha="right")
axes.text(STEPS, 8e-3, "not divided, either dtype", ha="right")
axes.set(xlabel="step", ylabel="largest difference of a weight", xticks=range(0, STEPS + 1, 5))
figure(fig)

# %% name="gap-values" ranks="3"
without = {
    name: gaps_between(undivided[name, torch.float64], alone[name, torch.float64])[-1]
    for name in OPTIMIZERS
}
assert without["Adam"] * 100 < without["SGD"], "Adam's step does not depend on the scale"
record(undivided_sgd=without["SGD"], undivided_adam=without["Adam"])

# %% [markdown]
# ## When the mean is something else
#
# From here on everything is in float64, so that what is not rounding stands out. The error is the
# length of the difference between the averaged gradient and that of the joined batch, divided by
# the length of the latter.
#
# ### A loss that sums

# %% name="sum-loss" ranks="4"
QUARTERS = [SAMPLES // 4] * 4
ROUNDING = 1e-13
averaged = miniddp.run_ranks(gradient_on_rank, 4, QUARTERS, "sum")[0]
joined_sum = gradient_alone(reduction="sum")
assert relative_error(4 * averaged, joined_sum) < ROUNDING
record(sum_error=relative_error(averaged, joined_sum))

# %% [markdown]
# ### Unequal counts

# %% name="unequal" ranks="2 3 4"
UNEQUAL = {2: [19, 5], 3: [14, 8, 2], 4: [10, 10, 3, 1]}
joined = gradient_alone()


def error_of(counts: list[int], weighted: bool) -> float:
    averaged = miniddp.run_ranks(gradient_on_rank, len(counts), counts, "mean", weighted)[0]
    return relative_error(averaged, joined)


rows = []
for world_size, counts in UNEQUAL.items():
    plain, weighted = error_of(counts, weighted=False), error_of(counts, weighted=True)
    assert weighted < ROUNDING < 0.05 < plain
    split = " + ".join(map(str, counts))
    rows.append([world_size, split, f"{plain:.2f}", f"{weighted:.0e}"])
table(rows, ["ranks", "samples", "error, plain mean", "error, weighted"], "rlrr")

# %% [markdown]
# ### Batch normalisation
#
# Layer normalisation, which treats each sample by itself, for contrast.


# %% name="batch-norm" ranks="4"
def error_with(norm: type[nn.Module]) -> float:
    averaged = miniddp.run_ranks(gradient_on_rank, 4, QUARTERS, "mean", False, norm(WIDTH))[0]
    return relative_error(averaged, gradient_alone(middle=norm(WIDTH)))


by_batch, by_layer = error_with(nn.BatchNorm1d), error_with(nn.LayerNorm)
assert by_layer < ROUNDING < 0.05 < by_batch
record(batch_norm_error=by_batch)

# %% [markdown]
# ### Dropout
#
# One seed for all ranks gives all of them the same masks. What that costs: the same batch again and
# again, each time with new masks. How far does the averaged gradient scatter around its mean? Here
# for a regression whose samples all pull the prediction the same way.

# %% name="scatter" ranks="1 4"
DROPOUT_RANKS = 4
on_one = miniddp.run_ranks(scatter_with_dropout, 1, True)[0]
seed_per_rank, one_seed = (
    miniddp.run_ranks(scatter_with_dropout, DROPOUT_RANKS, own_seed)[0] / on_one
    for own_seed in (True, False)
)
assert abs(seed_per_rank - 1) < 0.1, "as good as one process"
assert 1.4 < one_seed < math.sqrt(DROPOUT_RANKS) + 0.1
record(scatter_one_seed=one_seed)
