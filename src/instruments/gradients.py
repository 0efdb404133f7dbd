"""Gradients and weights as one vector each, and how far two of them are apart."""

from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector


def flat_gradient(module: nn.Module) -> Tensor:
    """All gradients of a module, in the order of its parameters, on the CPU.

    Raises `ValueError` naming a parameter without a gradient.
    """
    gradients = []
    for name, parameter in module.named_parameters():
        if parameter.grad is None:
            raise ValueError(f"parameter {name!r} has no gradient")
        gradients.append(parameter.grad)
    return parameters_to_vector(gradients).cpu()


def flat_weights(module: nn.Module) -> Tensor:
    """A copy of all parameters of a module, in their order, on the CPU."""
    return parameters_to_vector(module.parameters()).detach().cpu()


def largest_difference(one: Tensor, other: Tensor) -> float:
    """The largest difference between two elements in the same place."""
    return (one - other).abs().max().item()


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The length of the difference, divided by that of what was expected."""
    error = (found - expected).norm() / expected.norm()
    return float(error)


def scatter(draws: Tensor) -> float:
    """The standard deviation of vectors, (count, length).

    That is the root mean square of their distances from their mean.
    """
    squares = (draws - draws.mean(dim=0)).square().sum(dim=1)
    return squares.mean().sqrt().item()
