"""How much the gradients of samples differ: the noise scale.

McCandlish et al., "An Empirical Model of Large-Batch Training", 2018. The noise scale
is the sum of the variances of one sample's gradient over the squared length of the
mean of
all: the mean of that many samples is as noisy as it is long. Batches are drawn by
torch's own generator.
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from instruments.classifier import Samples, loss_of

DRAWS = 40


class Noise(NamedTuple):
    """The noise scale in samples, and the mean of all samples' gradients."""

    scale: float
    mean: Tensor


def noise_of(model: nn.Module, samples: Samples) -> Noise:
    """From the gradient of every single sample."""
    mean = gradient(model, samples).double()
    length = _square(mean)
    squares = 0.0
    for i in range(len(samples)):
        squares += _square(gradient(model, samples.take(slice(i, i + 1))))
    variance = squares / len(samples) - length
    return Noise(variance / length, mean)


def distance(model: nn.Module, samples: Samples, mean: Tensor, batch: int) -> float:
    """How far batches' gradients are from the mean of all, in lengths of that mean.

    The root of the mean square of some draws.
    """
    squares = []
    for _ in range(DRAWS):
        drawn = samples.take(torch.randint(len(samples), (batch,)))
        squares.append(_square(gradient(model, drawn) - mean) / _square(mean))
    return math.sqrt(statistics.mean(squares))


def noise_of_ranks(
    model: nn.Module, samples: Samples, ranks: int, batch: int, steps: int
) -> float:
    """The noise scale from what DDP has at hand, in the mean over some steps.

    That is each rank's gradient, of `batch` samples, and the mean of the ranks. A
    gradient of m samples has the squared length |G|² + variance / m on average: two
    numbers of samples give two equations for the two unknowns.
    """
    small = []
    large = []
    for _ in range(steps):
        draws = torch.randint(len(samples), (ranks, batch))
        of_ranks = [gradient(model, samples.take(chosen)) for chosen in draws]
        gradients = torch.stack(of_ranks)
        small.append(gradients.square().sum(1).mean().item())
        large.append(_square(gradients.mean(0)))
    return noise_from_lengths(
        statistics.mean(small), statistics.mean(large), batch, ranks * batch
    )


def noise_from_lengths(small: float, large: float, few: int, many: int) -> float:
    """The noise scale from mean squared lengths of gradients of `few` and `many`."""
    variance = (small - large) / (1 / few - 1 / many)
    return variance / (small - variance / few)


class Curve(NamedTuple):
    """Steps to a loss: `fewest * (1 + critical / batch)`, both numbers fitted."""

    fewest: float
    critical: float


def fit_steps(batches: Sequence[int], steps: Sequence[float]) -> Curve:
    """The curve that comes nearest to measured steps, by squared relative distances."""
    taken = torch.tensor(steps).unsqueeze(1)
    terms = torch.tensor([[1, 1 / batch] for batch in batches]) / taken
    solution = torch.linalg.lstsq(terms, torch.ones_like(taken)).solution
    fewest, slope = solution.flatten().tolist()
    return Curve(fewest, slope / fewest)


def gradient(model: nn.Module, samples: Samples) -> Tensor:
    """All gradients of the mean loss, one after the other."""
    loss = loss_of(model, samples)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([part.flatten() for part in gradients])


def _square(vector: Tensor) -> float:
    return vector.square().sum().item()
