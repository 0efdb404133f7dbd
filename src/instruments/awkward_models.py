"""Models for which a plan of buckets that is made before training is wrong."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from miniddp import set_seed
from miniddp.process import device

WIDTH = 256


def layers(count: int) -> list[nn.Linear]:
    """Linear layers of 256 KiB each."""
    return [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)]


class ListedBackwards(nn.Module):
    """Eight layers; the first to be used is the last in the list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers(8))

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            inputs = layer(inputs).tanh()
        return inputs


class TwoHeads(nn.Module):
    """A body of six layers and two heads, of which it uses the left one only."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*layers(6))
        self.left = nn.Linear(WIDTH, WIDTH, bias=False)
        self.right = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.left(self.body(inputs))
        return output


def listed_backwards() -> ListedBackwards:
    """Equal on all ranks, on this rank's device."""
    set_seed(0)
    return ListedBackwards().to(device())


def two_heads(frozen: bool) -> TwoHeads:
    """Equal on all ranks; the right head may be frozen."""
    set_seed(0)
    model = TwoHeads()
    model.right.requires_grad_(not frozen)
    return model.to(device())


def loss_of(model: nn.Module) -> Tensor:
    """Of one of these models, wrapped or not."""
    inputs = torch.ones(2, WIDTH, device=device())
    output: Tensor = model(inputs)
    return output.square().mean()


class Notice(NamedTuple):
    """When a class raises, and whether its error names the head that is not used."""

    moment: str
    names_it: bool


def notice(ddp: nn.Module) -> Notice:
    """What a DDP of `TwoHeads` does about the right head in the first step."""
    loss = loss_of(ddp)
    moment = "this backward"
    try:
        loss.backward()
        moment = "the next forward"
        loss_of(ddp)
    except RuntimeError as error:
        return Notice(moment, "right.weight" in str(error))
    return Notice("no", False)
