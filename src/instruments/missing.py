"""A parameter that not every rank uses: what two classes do about its gradient."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from instruments.origins import say
from miniddp import SimpleDDP, set_seed
from miniddp.process import device


class TwoHeads(nn.Module):
    """A body and two heads, `left` and `right`. Forward uses those that it names."""

    def __init__(self) -> None:
        super().__init__()
        set_seed(0)
        self.body = nn.Linear(4, 4)
        self.left = nn.Linear(4, 1)
        self.right = nn.Linear(4, 1)
        self.to(device())

    def forward(self, inputs: Tensor, heads: Sequence[str]) -> Tensor:
        hidden = self.body(inputs).tanh()
        return torch.stack([getattr(self, head)(hidden).sum() for head in heads]).sum()


def inputs_of(rank: int) -> Tensor:
    """Two samples of this rank's own, (2, 4)."""
    torch.manual_seed(100 + rank)
    return torch.randn(2, 4, device=device())


def step_with_simple_ddp(rank: int, heads_of: Sequence[Sequence[str]]) -> str:
    """A backward pass through `heads_of[rank]`; the error of `sync_gradients`, or "".

    Raises `AssertionError` if an error comes after a gradient was changed.
    """
    model = TwoHeads()
    ddp = SimpleDDP(model)
    ddp(inputs_of(rank), heads_of[rank]).backward()
    assert model.body.weight.grad is not None
    before = model.body.weight.grad.clone()
    try:
        ddp.sync_gradients()
    except RuntimeError as error:
        assert torch.equal(model.body.weight.grad, before), "a gradient was changed"
        say(f"sync_gradients raises RuntimeError: {error}")
        return str(error)
    return ""


def two_steps_with_torch(rank: int, heads_of: Sequence[Sequence[str]]) -> list[float]:
    """Two steps of torch's DDP through `heads_of[rank]`; says what passes and raises.

    Returns two elements of the last gradient of the body that backward has left.
    """
    model = TwoHeads()
    ddp = DistributedDataParallel(model)
    gradient: list[float] = []
    try:
        for step in range(2):
            loss = ddp(inputs_of(rank), heads_of[rank])
            say(f"step {step}: forward passes")
            loss.backward()
            say(f"step {step}: backward passes")
            assert model.body.weight.grad is not None
            gradient = model.body.weight.grad.flatten()[:2].tolist()
            values = " ".join(f"{value:+.3f}" for value in gradient)
            say(f"  body.weight.grad: {values}")
    except RuntimeError as error:
        say(f"step {step}: RuntimeError: {str(error).partition('.')[0]}")
    dist.barrier()
    return gradient
