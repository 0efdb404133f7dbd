"""A training so small that its fault is easy to see: model, batches, loss, loop."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from miniddp import set_seed
from miniddp.process import device


def small_model(seed: int = 0) -> nn.Module:
    """Four inputs, one output, 49 parameters; equal on all ranks with the same seed."""
    set_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(device())


def own_batches(rank: int, count: int) -> list[Tensor]:
    """Batches of 4 samples, shape (4, 4), different on each rank."""
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(4, 4, generator=generator).to(device()) for _ in range(count)]


def loss_of(outputs: Tensor) -> Tensor:
    return outputs.square().mean()


def train(model: nn.Module, batches: Iterable[Tensor]) -> None:
    """A step of SGD for each batch, on what needs a gradient now."""
    parameters = [
        parameter for parameter in model.parameters() if parameter.requires_grad
    ]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for inputs in batches:
        optimizer.zero_grad()
        loss_of(model(inputs)).backward()
        optimizer.step()
