"""Copies of a model that average their gradients: do they become, and stay, equal?"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional

from miniddp import set_seed
from miniddp.process import device
from miniddp.replicate import broadcast_module


class Step(NamedTuple):
    """A rank's loss, its largest distance from rank 0's weights, the gradient's length.

    All of them before the weights change.
    """

    loss: float
    gap: float
    mean_gradient: float


def train_from(rank: int, seeds: list[int], steps: int) -> list[Step]:
    """Ranks learn one linear function, each from 64 points of its own.

    `seeds[rank]` gives the first weights. The gradients are averaged in every step.
    """
    torch.manual_seed(7)
    truth = torch.randn(8, 1)
    torch.manual_seed(100 + rank)
    points = torch.randn(64, 8)
    torch.manual_seed(seeds[rank])
    model = torch.nn.Linear(8, 1, bias=False)
    taken = []
    for _ in range(steps):
        loss = functional.mse_loss(model(points), points @ truth)
        (gradient,) = torch.autograd.grad(loss, model.weight)
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
        of_rank_0 = model.weight.detach().clone()
        dist.broadcast(of_rank_0, src=0)
        gap = (model.weight - of_rank_0).abs().max()
        taken.append(Step(loss.item(), gap.item(), gradient.norm().item()))
        with torch.no_grad():
            model.weight -= 0.1 * gradient
    return taken


MOMENTS = ("before 1", "after 1", "before 2", "after 2")


def running_means(rank: int) -> list[list[float]]:
    """The running means of three features at each of `MOMENTS`, under torch's DDP.

    They stand in a batch normalisation, before and after it is called in two forward
    passes. The ranks have equal weights and data of their own.
    """
    set_seed(42)
    layers = (torch.nn.Linear(8, 3), torch.nn.BatchNorm1d(3))
    model = torch.nn.Sequential(*layers).to(device())
    set_seed(42, rank_offset=rank)
    seen: list[list[float]] = []

    def note(norm: torch.nn.Module, *_: object) -> None:
        seen.append(norm.get_buffer("running_mean").tolist())

    model[1].register_forward_pre_hook(note)
    model[1].register_forward_hook(note)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    for _ in range(2):
        ddp(torch.randn(16, 8).to(device()))
    return seen


VALUES = 12


class Drawn(NamedTuple):
    """A layer's first weight, and which of 12 values a dropout that follows keeps."""

    weight: float
    kept: list[bool]


def draw_in_four_ways(rank: int) -> dict[str, Drawn]:
    """What this rank draws if it seeds in each of four ways."""
    found = {}
    set_seed(42)
    found["one seed for all"] = _dropout_after(_layer())
    set_seed(42, rank_offset=rank)
    found["a seed per rank"] = _dropout_after(_layer())
    set_seed(42)
    layer = _layer()
    set_seed(42, rank_offset=1 + rank)
    found["one seed, then a seed per rank"] = _dropout_after(layer)
    set_seed(42, rank_offset=rank)
    layer = _layer()
    broadcast_module(layer)
    found["a seed per rank, then broadcast"] = _dropout_after(layer)
    return found


def _layer() -> torch.nn.Linear:
    return torch.nn.Linear(4, 4).to(device())


def _dropout_after(layer: torch.nn.Linear) -> Drawn:
    kept = functional.dropout(torch.ones(VALUES, device=device()), p=0.5) > 0
    return Drawn(layer.weight[0, 0].item(), kept.tolist())
