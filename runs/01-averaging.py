# %% [markdown]
# # Why averaging works
#
# The program of the first page compares itself with one process, on two ranks and on five. Then a
# small classifier that one process and 2, 3 and 4 ranks train on the same samples: are the
# gradients the same, and the weights? Last, cases in which the mean of the ranks is not the
# gradient of the joined batch.

# %% name="setup"
import math
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector
from torch.optim import SGD, Adam, Optimizer
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaRMSNorm

import miniddp
from book import (
    FOREGROUND,
    MUTED,
    RANK_COLORS,
    figure,
    provenance,
    record,
    table,
)
from miniddp.accumulation import mean_weights
from miniddp.process import device

WORLD_SIZES = [2, 3, 4]
provenance(device=device(), world_size=[2, 3, 4, 5], backend="gloo")

# %% [markdown]
# ## The program of the first page, against one process
#
# Its batch has 36 sequences. Two ranks divide it, five do not.

# %% name="stage"
STAGES = Path(miniddp.__file__).parents[2] / "stages"
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


class Printed(NamedTuple):
    """What a stage printed: all, the differences to one process by dtype, losses by step."""

    text: str
    off: dict[str, float]
    losses: dict[int, float]


def printed_by(*command: str) -> Printed:
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, check=True, capture_output=True, text=True, env=one_thread)
    off = re.findall(r"off by (\S+) at most in torch\.(\w+)", ended.stdout)
    losses = re.findall(r"step +(\d+)  loss (\S+)", ended.stdout)
    return Printed(
        ended.stdout,
        {dtype: float(difference) for difference, dtype in off},
        {int(step): float(loss) for step, loss in losses},
    )


one_process = printed_by(sys.executable, str(STAGES / "0_one_process.py"))
on_ranks = {
    ranks: printed_by(*LAUNCHER, f"--nproc_per_node={ranks}", str(STAGES / "1_average.py"))
    for ranks in (2, 5)
}
assert on_ranks[2].off["float64"] < 1e-12 < on_ranks[2].off["float32"] < 1e-6
assert all(difference > 1e-4 for difference in on_ranks[5].off.values())
last = max(one_process.losses)
rows = [["one process", "", "", f"{one_process.losses[last]:.3f}"]]
for ranks, printed in on_ranks.items():
    assert abs(printed.losses[last] / one_process.losses[last] - 1) < 0.01, "the loss does not tell"
    off = [f"{printed.off[dtype]:.0e}" for dtype in ("float32", "float64")]
    rows.append([f"{ranks} ranks", *off, f"{printed.losses[last]:.3f}"])
table(rows, ["trained on", "off by, float32", "off by, float64", "last loss"], "lrrr")

# %% [markdown]
# All that it prints on two ranks:

# %% name="printed"
print(on_ranks[2].text, end="")

# %% name="stage-values"
record(
    steps_of_stage=last,
    off_two_float32=on_ranks[2].off["float32"],
    off_two_float64=on_ranks[2].off["float64"],
    off_five=on_ranks[5].off["float64"],
    apart=max(abs(loss - on_ranks[2].losses[step]) for step, loss in one_process.losses.items()),
)

# %% [markdown]
# The losses of one process and of two ranks:

# %% name="curves"
fig, axes = plt.subplots(figsize=(5.2, 2.8))
thick = {"linewidth": 7, "alpha": 0.35, "color": RANK_COLORS[0]}
axes.plot(*zip(*one_process.losses.items(), strict=True), label="one process", **thick)
thin = {"linewidth": 2, "marker": "o", "color": RANK_COLORS[1]}
axes.plot(*zip(*on_ranks[2].losses.items(), strict=True), label="two ranks", **thin)
axes.set(xlabel="step", ylabel="loss of the batch")
axes.legend()
figure(fig)

# %% [markdown]
# Three ranks compute in float64, first as the model is, then with its norms and its loss in float64
# too: they compute in float32 whatever the weights are.


# %% name="three"
def in_float64(model: nn.Module) -> None:
    def norm(self: LlamaRMSNorm, hidden: Tensor) -> Tensor:
        variance = hidden.square().mean(-1, keepdim=True)
        return self.weight * hidden * (variance + self.variance_epsilon).rsqrt()

    def loss(logits: Tensor, labels: Tensor, **_: object) -> Tensor:
        return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    LlamaRMSNorm.forward = norm
    LlamaForCausalLM.loss_function = staticmethod(loss)


class FirstStep(NamedTuple):
    """The functions of stage 1, its model and its first batch."""

    functions: dict[str, Callable]
    model: nn.Module
    batch: Tensor


def first_step() -> FirstStep:
    functions = runpy.run_path(str(STAGES / "1_average.py"))
    torch.manual_seed(0)
    model = functions["build_language_model"]()
    return FirstStep(functions, model, next(functions["batches"](functions["load_text"]()[0])))


def compare(rank: int) -> None:
    functions, model, batch = first_step()
    functions["compare_with_one_process"](model, batch)
    in_float64(model)
    functions["compare_with_one_process"](model, batch)


said = miniddp.run_ranks(compare, 3).outputs[0]
off_three, off_three_in_float64 = map(float, re.findall(r"off by (\S+) .*float64", said))
assert off_three_in_float64 < 1e-14 < off_three < 1e-7
record(off_three=off_three, off_three_in_float64=off_three_in_float64)

# %% [markdown]
# Five ranks again, each weighed by its share of the batch:


# %% name="five"
def weigh(rank: int) -> tuple[float, float]:
    """How far the weighted mean is off, and the gradient's largest element."""
    functions, model, batch = first_step()
    part = batch[rank :: dist.get_world_size()]
    mean = functions["gradient_of"](model, part) * len(part) / len(batch)
    dist.all_reduce(mean)
    whole = functions["gradient_of"](model, batch)
    return (mean - whole).abs().max().item(), whole.abs().max().item()


off_five_weighted, largest_element = miniddp.run_ranks(weigh, 5)[0]
assert off_five_weighted < 1e-6
record(off_five_weighted=off_five_weighted, largest_element=largest_element)

# %% [markdown]
# ## The same training, alone and on ranks
#
# A small classifier of random points. Each step has a new batch, and every process makes the same
# one from the step's number.

# %% name="model"
SAMPLES, FEATURES, CLASSES, STEPS = 24, 16, 4, 20
NewOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
OPTIMIZERS: dict[str, NewOptimizer] = {"SGD": partial(SGD, lr=0.2), "Adam": partial(Adam, lr=0.01)}


def build(dtype: torch.dtype = torch.float64, middle: nn.Module | None = None) -> nn.Module:
    miniddp.set_seed(0)
    first, last = nn.Linear(FEATURES, 32), nn.Linear(32, CLASSES)
    return nn.Sequential(first, middle or nn.Identity(), nn.Tanh(), last).to(device(), dtype)


def batch_of(step: int, dtype: torch.dtype = torch.float64, samples: int = SAMPLES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    inputs = torch.randn(samples, FEATURES, generator=generator)
    labels = inputs[:, :CLASSES].argmax(dim=1)
    return [inputs.to(device(), dtype), labels.to(device())]


class Snapshot(NamedTuple):
    """After one step, on the CPU: the gradient it used and the weights it led to."""

    gradient: Tensor
    weights: Tensor


def snapshot(model: nn.Module) -> Snapshot:
    return Snapshot(flat_gradient(model), parameters_to_vector(model.parameters()).detach().cpu())


def flat_gradient(model: nn.Module) -> Tensor:
    return parameters_to_vector([parameter.grad for parameter in model.parameters()]).cpu()


# %% name="train"
def train_alone(new_optimizer: NewOptimizer, dtype: torch.dtype) -> list[Snapshot]:
    model = build(dtype)
    optimizer = new_optimizer(model.parameters())
    history = []
    for step in range(STEPS):
        inputs, labels = batch_of(step, dtype)
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        history.append(snapshot(model))
        optimizer.zero_grad()
    return history


def train_on_rank(
    rank: int,
    world_size: int,
    new_optimizer: NewOptimizer,
    dtype: torch.dtype,
    wrap: Callable[[nn.Module], nn.Module] = miniddp.SimpleDDP,
) -> list[Snapshot]:
    model = wrap(build(dtype))
    optimizer = new_optimizer(model.parameters())
    history = []
    for step in range(STEPS):
        batch = batch_of(step, dtype)
        inputs, labels = (tensor.chunk(world_size)[rank] for tensor in batch)
        cross_entropy(model(inputs), labels).backward()
        model.sync_gradients()
        optimizer.step()
        history.append(snapshot(model))
        optimizer.zero_grad()
    return history


# %% [markdown]
# The largest difference of any element from the one process's: of the gradient in the first step,
# and of the weights after the last.

# %% name="parity"
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-13}


def largest_difference(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


def train_all(rank: int, world_size: int) -> dict[tuple, list[Snapshot]]:
    return {
        (name, dtype): train_on_rank(rank, world_size, new_optimizer, dtype)
        for name, new_optimizer in OPTIMIZERS.items()
        for dtype in TOLERANCES
    }


alone = {
    (name, dtype): train_alone(new_optimizer, dtype)
    for name, new_optimizer in OPTIMIZERS.items()
    for dtype in TOLERANCES
}
gaps: dict[tuple, list[float]] = {}
for world_size in WORLD_SIZES:
    ranks = miniddp.run_ranks(train_all, world_size, world_size)
    for (optimizer, dtype), expected in alone.items():
        found = ranks[0][optimizer, dtype]
        for other in ranks[1:]:
            same = zip(found, other[optimizer, dtype], strict=True)
            assert all(torch.equal(a.weights, b.weights) for a, b in same), "ranks stay equal"
        gradient = largest_difference(found[0].gradient, expected[0].gradient)
        weights = [
            largest_difference(a.weights, b.weights) for a, b in zip(found, expected, strict=True)
        ]
        assert largest_difference(expected[-1].weights, expected[0].weights) > 0.05, "it trains"
        assert gradient < TOLERANCES[dtype]
        assert max(weights) < TOLERANCES[dtype]
        gaps[world_size, optimizer, dtype] = weights

# %% [markdown]
# PyTorch's own class, which synchronises during backward, on three ranks:


# %% name="parity-values"
class TorchDDP(DistributedDataParallel):
    def sync_gradients(self) -> None:
        """Done in backward."""


adam_in_float64 = OPTIMIZERS["Adam"], torch.float64
torch_ranks = miniddp.run_ranks(partial(train_on_rank, wrap=TorchDDP), 3, 3, *adam_in_float64)
torch_gap = largest_difference(torch_ranks[0][-1].weights, alone["Adam", torch.float64][-1].weights)
assert torch_gap < TOLERANCES[torch.float64]
worst = {dtype: max(max(gaps[key]) for key in gaps if key[2] is dtype) for dtype in TOLERANCES}
record(
    samples=SAMPLES,
    steps=STEPS,
    parameters=alone["SGD", torch.float64][0].weights.numel(),
    worst_float32=worst[torch.float32],
    worst_float64=worst[torch.float64],
    torch_float64=torch_gap,
)
assert worst[torch.float64] * 1e4 < worst[torch.float32]

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


# %% name="gap"
class SumOfRanks(miniddp.SimpleDDP):
    def sync_gradients(self) -> None:
        super().sync_gradients()
        for parameter in self.parameters():
            parameter.grad *= dist.get_world_size()


def train_without_dividing(rank: int) -> dict[tuple, list[Snapshot]]:
    return {
        (name, dtype): train_on_rank(rank, 3, new_optimizer, dtype, wrap=SumOfRanks)
        for name, new_optimizer in OPTIMIZERS.items()
        for dtype in TOLERANCES
    }


undivided = miniddp.run_ranks(train_without_dividing, 3)[0]
fig, axes = plt.subplots()
for dtype, line in ((torch.float32, "-"), (torch.float64, "--")):
    reference = zip(undivided["SGD", dtype], alone["SGD", dtype], strict=True)
    wrong = [largest_difference(a.weights, b.weights) for a, b in reference]
    assert min(wrong) > 1e-3, "a mistake does not shrink with the precision"
    steps = range(1, STEPS + 1)
    axes.semilogy(steps, wrong, line, marker="x", color=MUTED)
    axes.semilogy(steps, gaps[3, "SGD", dtype], line, marker="o", color=FOREGROUND)
    name = str(dtype).removeprefix("torch.")
    axes.text(STEPS, 30 * max(gaps[3, "SGD", dtype]), f"mean, {name}", ha="right")
axes.text(STEPS, 8e-3, "not divided, either dtype", ha="right")
axes.set(xlabel="step", ylabel="largest difference of a weight", xticks=range(0, STEPS + 1, 5))
figure(fig)

# %% name="gap-values"
without = {
    name: largest_difference(
        undivided[name, torch.float64][-1].weights, alone[name, torch.float64][-1].weights
    )
    for name in OPTIMIZERS
}
assert without["Adam"] * 100 < without["SGD"], "Adam's step does not depend on the scale"
record(
    undivided_sgd=without["SGD"],
    undivided_adam=without["Adam"],
    gap_float32=max(gaps[3, "SGD", torch.float32]),
    gap_float64=max(gaps[3, "SGD", torch.float64]),
)

# %% [markdown]
# ## When the mean is something else
#
# From here on everything is in float64, so that what is not rounding stands out. The error is the
# length of the difference between the averaged gradient and that of the joined batch, divided by
# the length of the latter.


# %% name="gradients"
def gradient_alone(reduction: str = "mean", middle: nn.Module | None = None) -> Tensor:
    model = build(middle=middle)
    inputs, labels = batch_of(0)
    cross_entropy(model(inputs), labels, reduction=reduction).backward()
    return flat_gradient(model)


def gradient_on_rank(
    rank: int,
    counts: Sequence[int],
    reduction: str = "mean",
    weighted: bool = False,
    middle: nn.Module | None = None,
) -> Tensor:
    """The averaged gradient, where rank r has `counts[r]` of the samples."""
    model = miniddp.SimpleDDP(build(middle=middle))
    inputs, labels = (tensor.split(list(counts))[rank] for tensor in batch_of(0))
    loss = cross_entropy(model(inputs), labels, reduction=reduction)
    if weighted:
        [weight] = mean_weights([len(labels)])
        loss = weight * loss
    loss.backward()
    model.sync_gradients()
    return flat_gradient(model.module)


def error(found: Tensor, joined: Tensor) -> float:
    return ((found - joined).norm() / joined.norm()).item()


def equal_counts(world_size: int) -> list[int]:
    return [SAMPLES // world_size] * world_size


ROUNDING = 1e-13

# %% [markdown]
# ### A loss that sums

# %% name="sum-loss"
joined_sum = gradient_alone(reduction="sum")
for world_size in WORLD_SIZES:
    averaged = miniddp.run_ranks(gradient_on_rank, world_size, equal_counts(world_size), "sum")[0]
    assert error(averaged * world_size, joined_sum) < ROUNDING
    if world_size == 4:
        record(sum_error=error(averaged, joined_sum))

# %% [markdown]
# ### Unequal counts

# %% name="unequal"
UNEQUAL = {2: [19, 5], 3: [14, 8, 2], 4: [10, 10, 3, 1]}


def plain_and_weighted(rank: int, counts: Sequence[int]) -> list[Tensor]:
    return [gradient_on_rank(rank, counts, weighted=weighted) for weighted in (False, True)]


joined = gradient_alone()
rows = []
for world_size, counts in UNEQUAL.items():
    averaged = miniddp.run_ranks(plain_and_weighted, world_size, counts)[0]
    plain, weighted = (error(gradient, joined) for gradient in averaged)
    assert weighted < ROUNDING < 0.05 < plain
    split = " + ".join(map(str, counts))
    rows.append([world_size, split, f"{plain:.2f}", f"{weighted:.0e}"])
table(rows, ["ranks", "samples", "error, plain mean", "error, weighted"], "rlrr")

# %% [markdown]
# ### Batch normalisation

# %% name="batch-norm"
NORMS = (nn.BatchNorm1d, nn.LayerNorm)


def with_each_norm(rank: int, world_size: int) -> list[Tensor]:
    counts = equal_counts(world_size)
    return [gradient_on_rank(rank, counts, middle=norm(32)) for norm in NORMS]


averaged = miniddp.run_ranks(with_each_norm, 4, 4)[0]
by_batch, by_layer = (
    error(found, gradient_alone(middle=norm(32)))
    for norm, found in zip(NORMS, averaged, strict=True)
)
assert by_layer < ROUNDING < 0.05 < by_batch
record(batch_norm_error=by_batch)

# %% [markdown]
# ### Dropout
#
# One seed for all ranks gives all of them the same masks. What that costs: the same batch again and
# again, each time with new masks. How far does the averaged gradient scatter around its mean? Once
# for the classifier, and once for a regression whose samples all pull the prediction the same way.

# %% name="scatter"
DRAWS, DROPOUT_RANKS = 300, 4
Task = tuple[nn.Module, Callable[[Tensor, Tensor], Tensor], Tensor, Tensor]


def classify() -> Task:
    return build(middle=nn.Dropout(0.5)), cross_entropy, *batch_of(0)


def regress() -> Task:
    miniddp.set_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 32), nn.Sigmoid(), nn.Dropout(0.5), nn.Linear(32, 1))
    inputs, _ = batch_of(0)
    return model.to(device(), torch.float64), mse_loss, inputs, 3 + inputs[:, :1]


def scatter(rank: int, make_task: Callable[[], Task], world_size: int, own_seed: bool) -> float:
    model, loss_of, *batch = make_task()
    inputs, targets = (tensor.chunk(world_size)[rank] for tensor in batch)
    miniddp.set_seed(7, rank_offset=rank if own_seed else 0)
    gradients = torch.stack([own_gradient(model, loss_of, inputs, targets) for _ in range(DRAWS)])
    gradients /= world_size
    dist.all_reduce(gradients)  # all draws at once: sums do not mind
    return (gradients - gradients.mean(dim=0)).square().sum(dim=1).mean().sqrt().item()


def own_gradient(model: nn.Module, loss_of: Callable, inputs: Tensor, targets: Tensor) -> Tensor:
    model.zero_grad()
    loss_of(model(inputs), targets).backward()
    return flat_gradient(model)


for make_task in (classify, regress):
    one_process = miniddp.run_ranks(scatter, 1, make_task, 1, True)[0]
    own_seeds, one_seed = (
        miniddp.run_ranks(scatter, DROPOUT_RANKS, make_task, DROPOUT_RANKS, own_seed)[0]
        / one_process
        for own_seed in (True, False)
    )
    assert abs(own_seeds - 1) < 0.1, "as good as one process"
    assert own_seeds < one_seed < math.sqrt(DROPOUT_RANKS) + 0.1
assert one_seed > 1.4
record(scatter_one_seed=one_seed)
