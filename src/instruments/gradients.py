"""Gradients and weights as one vector each, and how far two of them are apart."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector


def flat_gradient(module: nn.Module) -> Tensor:
    """All gradients of a module in the order of its parameters: one dimension, on the CPU."""
    gradients = []
    for name, parameter in module.named_parameters():
        if parameter.grad is None:
            raise ValueError(f"parameter {name!r} has no gradient")
        gradients.append(parameter.grad)
    return parameters_to_vector(gradients).cpu()


def flat_weights(module: nn.Module) -> Tensor:
    """A copy of all parameters of a module in their order: one dimension, on the CPU."""
    return parameters_to_vector(module.parameters()).detach().cpu()


def largest_difference(one: Tensor, other: Tensor) -> float:
    """The largest difference between two elements in the same place."""
    return (one - other).abs().max().item()


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The length of the difference, divided by that of what was expected."""
    error = (found - expected).norm() / expected.norm()
    return float(error)


def scatter(draws: Tensor) -> float:
    """The standard deviation of vectors (count, length): the root mean square of their distances
    from their mean."""
    squares = (draws - draws.mean(dim=0)).square().sum(dim=1)
    return squares.mean().sqrt().item()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Sequence[Tensor]],
    synchronise: Callable[[nn.Module], None],
) -> list[Tensor]:
    """The weights after each step of a training with cross entropy.

    A batch holds inputs and labels. `synchronise` gets the model between backward and the
    optimizer's step.
    """
    history = []
    for inputs, labels in batches:
        loss = cross_entropy(model(inputs), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        synchronise(model)
        optimizer.step()
        optimizer.zero_grad()
        history.append(flat_weights(model))
    return history
