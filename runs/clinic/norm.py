"""Case 11: batch normalisation forgets what the other ranks saw."""

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from instruments.replicas import mean_over_ranks
from instruments.toy import loss_of
from miniddp.process import device


def keep_the_statistics_of_rank_0(rank: int) -> list[float]:
    ddp = DistributedDataParallel(normalised_model())
    for inputs in shifted_batches(rank):
        loss_of(ddp(inputs)).backward()
    return evaluate_normalisation(ddp.module[0])


def evaluate_normalisation(layer: nn.Module) -> list[float]:
    """The running statistics, and those of all data once normalised."""
    everything = torch.cat(shifted_batches(0) + shifted_batches(1))
    normalised = layer.eval()(everything)
    statistics = [
        layer.running_mean,
        layer.running_var,
        normalised.mean(),
        normalised.var(),
    ]
    return [statistic.item() for statistic in statistics]


def normalised_model() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1)).to(device())


def shifted_batches(rank: int) -> list[Tensor]:
    """Batches of data with the mean 0 on rank 0, and 4 on rank 1."""
    generator = torch.Generator().manual_seed(100 + rank)
    data = torch.randn(60, 16, 1, generator=generator) + 4 * rank
    return list(data.to(device()))


def follow_the_buffer(rank: int) -> None:
    """Print the running mean before a step, as forward begins, and after."""
    ddp = DistributedDataParallel(normalised_model())
    mean = ddp.module[0].running_mean
    at_forward: list[float] = []
    ddp.module.register_forward_pre_hook(
        lambda *_: at_forward.append(mean.item())
    )
    for inputs in shifted_batches(rank)[:3]:
        before = mean.item()
        loss_of(ddp(inputs)).backward()
        values = (before, at_forward[-1], mean.item())
        print(" → ".join(f"{round(value, 2) + 0:5.2f}" for value in values))


def merge_before_evaluating(rank: int) -> list[float]:
    ddp = DistributedDataParallel(
        normalised_model(), forward_sync_buffers=False
    )
    for inputs in shifted_batches(rank):
        loss_of(ddp(inputs)).backward()
    merge_statistics(ddp.module[0])
    return evaluate_normalisation(ddp.module[0])


def merge_statistics(layer: nn.Module) -> None:
    """From those of each rank's data to those of all data."""
    squares = layer.running_var + layer.running_mean.square()
    mean = mean_over_ranks(layer.running_mean)
    variance = mean_over_ranks(squares) - mean.square()
    layer.running_mean.copy_(mean)
    layer.running_var.copy_(variance)
