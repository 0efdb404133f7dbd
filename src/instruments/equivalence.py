"""A small classifier, trained on one process and on ranks: is it the same training?

Every process makes the same batches, from the number of the step.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from instruments.gradients import (
    flat_gradient,
    flat_weights,
    largest_difference,
    scatter,
)
from miniddp import SimpleDDP, set_seed
from miniddp.accumulation import mean_weights
from miniddp.process import device

SAMPLES, FEATURES, CLASSES = 24, 16, 4
WIDTH = 32
"""The features after the first layer, which `middle` of `build` gets."""

STEPS = 20
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.2),
    "Adam": partial(torch.optim.Adam, lr=0.01),
}


def build(
    dtype: torch.dtype = torch.float64, middle: nn.Module | None = None
) -> nn.Module:
    """The classifier, equal in every process; `middle` follows its first layer."""
    set_seed(0)
    first = nn.Linear(FEATURES, WIDTH)
    last = nn.Linear(WIDTH, CLASSES)
    model = nn.Sequential(first, middle or nn.Identity(), nn.Tanh(), last)
    return model.to(device(), dtype)


def batch_of(step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Inputs (24, 16) and labels (24,): which of the first four inputs is largest."""
    generator = torch.Generator().manual_seed(1000 + step)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    labels = inputs[:, :CLASSES].argmax(dim=1)
    return inputs.to(device(), dtype), labels.to(device())


def train_alone(optimizer: str, dtype: torch.dtype) -> list[Tensor]:
    """The weights after each step on one process."""
    batches = [batch_of(step, dtype) for step in range(STEPS)]
    return _train(build(dtype), optimizer, batches, lambda model: None)


def train_on_rank(
    optimizer: str,
    dtype: torch.dtype,
    wrap: Callable[[nn.Module], nn.Module] = SimpleDDP,
    synchronise: Callable[[nn.Module], None] = SimpleDDP.sync_gradients,  # type: ignore[assignment]
) -> list[Tensor]:
    """The weights after each step on a rank, which takes an equal part of each batch.

    `synchronise` gets the wrapped model between backward and the optimizer's step.
    """
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    parts = []
    for step in range(STEPS):
        inputs, labels = batch_of(step, dtype)
        parts.append((inputs.chunk(world_size)[rank], labels.chunk(world_size)[rank]))
    return _train(wrap(build(dtype)), optimizer, parts, synchronise)


def _train(
    model: nn.Module,
    optimizer_name: str,
    batches: Sequence[tuple[Tensor, Tensor]],
    synchronise: Callable[[nn.Module], None],
) -> list[Tensor]:
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    history = []
    for inputs, labels in batches:
        loss = cross_entropy(model(inputs), labels)
        loss.backward()
        synchronise(model)
        optimizer.step()
        optimizer.zero_grad()
        history.append(flat_weights(model))
    return history


def gaps_between(found: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    """The largest difference of any weight, after each step."""
    return [
        largest_difference(one, other)
        for one, other in zip(found, expected, strict=True)
    ]


def gradient_alone(reduction: str = "mean", middle: nn.Module | None = None) -> Tensor:
    """The gradient of the first batch on one process, in float64."""
    model = build(middle=middle)
    inputs, labels = batch_of(0)
    loss = cross_entropy(model(inputs), labels, reduction=reduction)
    loss.backward()
    return flat_gradient(model)


def gradient_on_rank(
    rank: int,
    counts: Sequence[int],
    reduction: str = "mean",
    weighted: bool = False,
    middle: nn.Module | None = None,
) -> Tensor:
    """The averaged gradient of the first batch, in float64.

    Rank r has `counts[r]` of its samples. With `weighted` each rank's loss
    is weighed by its part of the samples.
    """
    model = SimpleDDP(build(middle=middle))
    inputs, labels = batch_of(0)
    own_inputs = torch.split(inputs, list(counts))[rank]
    own_labels = torch.split(labels, list(counts))[rank]
    loss = cross_entropy(model(own_inputs), own_labels, reduction=reduction)
    if weighted:
        [weight] = mean_weights([len(own_labels)])
        loss = weight * loss
    loss.backward()
    model.sync_gradients()
    return flat_gradient(model)


def scatter_with_dropout(rank: int, own_seed: bool, draws: int = 300) -> float:
    """How far the averaged gradient of one batch scatters, with new masks in each draw.

    A regression with dropout whose samples all pull the prediction the same way. The
    ranks draw their masks from a seed of their own, or all from one.
    """
    set_seed(0)
    model = nn.Sequential(
        nn.Linear(FEATURES, WIDTH), nn.Sigmoid(), nn.Dropout(0.5), nn.Linear(WIDTH, 1)
    ).to(device(), torch.float64)
    points, _ = batch_of(0)
    inputs = points.chunk(dist.get_world_size())[rank]
    set_seed(7, rank_offset=rank if own_seed else 0)
    gradients = []
    for _ in range(draws):
        model.zero_grad()
        mse_loss(model(inputs), 3 + inputs[:, :1]).backward()
        gradients.append(flat_gradient(model) / dist.get_world_size())
    means = torch.stack(gradients)
    dist.all_reduce(means)  # all draws at once: sums do not mind
    return scatter(means)
