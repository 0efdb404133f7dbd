"""Case 10: clipping before the ranks are averaged."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from instruments.gradients import flat_gradient
from instruments.toy import loss_of, own_batches, small_model
from miniddp import SimpleDDP
from miniddp.process import device

TARGETS = (-0.5, 4.0)  # of each rank: those of rank 1 are far away


def clip_then_synchronise(rank: int) -> Tensor:
    ddp = SimpleDDP(small_model())
    unequal_loss(ddp, [rank]).backward()
    clip_grad_norm_(ddp.parameters(), max_norm=1.0)
    ddp.sync_gradients()
    return flat_gradient(ddp)


def unequal_loss(model: nn.Module, ranks: Sequence[int]) -> Tensor:
    """The loss on the batches of these ranks, joined."""
    inputs = torch.cat([own_batches(rank, 1)[0] for rank in ranks])
    targets = torch.tensor(
        [[TARGETS[rank]] for rank in ranks for _ in range(4)]
    )
    return loss_of(model(inputs) - targets.to(device()))


def clipped_alone() -> Tensor:
    """The clipped gradient of one process with both batches."""
    model = small_model()
    unequal_loss(model, [0, 1]).backward()
    clip_grad_norm_(model.parameters(), max_norm=1.0)
    return flat_gradient(model)


def show_norms(rank: int) -> None:
    ddp = SimpleDDP(small_model())
    unequal_loss(ddp, [rank]).backward()
    print(f"own       {flat_gradient(ddp).norm():.2f}")
    clip_grad_norm_(ddp.parameters(), max_norm=1.0)
    print(f"clipped   {flat_gradient(ddp).norm():.2f}")
    ddp.sync_gradients()
    print(f"averaged  {flat_gradient(ddp).norm():.2f}")


def synchronise_then_clip(rank: int) -> Tensor:
    ddp = SimpleDDP(small_model())
    unequal_loss(ddp, [rank]).backward()
    ddp.sync_gradients()
    clip_grad_norm_(ddp.parameters(), max_norm=1.0)
    return flat_gradient(ddp)
