"""A classifier that trains in a second, so that it can be trained many times."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import cycle, pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

INPUTS = 32
CLASSES = 10
HIDDEN = 64
GUESSING = math.log(CLASSES)
"""The loss of a guess."""

TEACHER_WIDTH = 24
TEACHER_SEED = 7
CHECK_EVERY = 4
"""Steps between two looks at the loss that shall be reached."""


@dataclass(frozen=True)
class Samples:
    """Inputs of shape (count, INPUTS), and their labels, from 0 to CLASSES - 1."""

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.inputs)

    def take(self, chosen: Tensor | slice) -> "Samples":
        return Samples(self.inputs[chosen], self.labels[chosen])

    def split(self, batch: int) -> list["Samples"]:
        """All samples in their order, in batches; the last one may be smaller."""
        starts = range(0, len(self), batch)
        return [self.take(slice(start, start + batch)) for start in starts]

    def shuffled(self, batch: int, seed: int) -> list["Samples"]:
        """All samples once, in an order that the seed decides, in batches."""
        generator = torch.Generator().manual_seed(seed)
        return self.take(torch.randperm(len(self), generator=generator)).split(batch)


def noisy_samples(count: int, seed: int) -> Samples:
    """Samples whose labels are drawn by chance from what a fixed network says."""
    generator = torch.Generator().manual_seed(TEACHER_SEED)
    first = torch.randn(INPUTS, TEACHER_WIDTH, generator=generator) / 4
    second = torch.randn(TEACHER_WIDTH, CLASSES, generator=generator)
    generator.manual_seed(seed)
    inputs = torch.randn(count, INPUTS, generator=generator)
    probabilities = (inputs @ first).tanh().mm(second).softmax(1)
    labels = torch.multinomial(probabilities, 1, generator=generator).squeeze(1)
    return Samples(inputs, labels)


def classifier(seed: int) -> nn.Sequential:
    """Four linear layers with ReLUs between them."""
    torch.manual_seed(seed)
    widths = [INPUTS, HIDDEN, HIDDEN, HIDDEN, CLASSES]
    layers = [nn.Linear(into, out) for into, out in pairwise(widths)]
    modules: list[nn.Module] = []
    for layer in layers:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        modules += [layer, nn.ReLU()]
    return nn.Sequential(*modules[:-1])


def loss_of(model: nn.Module, samples: Samples) -> Tensor:
    return cross_entropy(model(samples.inputs), samples.labels)


def train(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterable[Samples],
    rate_of: Callable[[int], float],
) -> list[float]:
    """A step for each batch, with the rate of its number; the loss of each batch."""
    losses = []
    for step, batch in enumerate(batches):
        optimizer.param_groups[0]["lr"] = rate_of(step)
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


def evaluate(model: nn.Module, samples: Samples) -> float:
    """The loss on samples that it has not learnt from; infinite if it is no number."""
    with torch.no_grad():
        loss = loss_of(model, samples).item()
    return loss if math.isfinite(loss) else math.inf


def steps_until(
    target: float,
    model: nn.Module,
    optimizer: Optimizer,
    batches: list[Samples],
    held_out: Samples,
    most: float,
) -> float:
    """The steps until the loss on `held_out` is down at the target.

    Infinite if it is not there after `most`. The batches begin anew where they end.
    """
    for step, batch in enumerate(cycle(batches), 1):
        if step > most:
            break
        optimizer.zero_grad()
        loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % CHECK_EVERY == 0 and evaluate(model, held_out) <= target:
            return step
    return math.inf
