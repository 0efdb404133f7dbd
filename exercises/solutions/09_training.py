"""A solution of exercise 9."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


def train(
    model: nn.Module,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    test_inputs: torch.Tensor,
    test_targets: torch.Tensor,
    batch_size: int,
    learning_rate: float,
) -> tuple[list[float], float]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ddp = DistributedDataParallel(model)  # copies rank 0's weights
    optimizer = torch.optim.SGD(ddp.parameters(), lr=learning_rate)
    losses = []
    for first in range(0, len(inputs) - batch_size + 1, batch_size):
        own = slice(first + rank, first + batch_size, world_size)
        optimizer.zero_grad()
        loss = cross_entropy(ddp(inputs[own]), targets[own])
        loss.backward()
        optimizer.step()
        mean = loss.detach() / world_size
        dist.all_reduce(mean)
        losses.append(mean.item())

    with torch.no_grad():
        own = slice(rank, None, world_size)
        correct = (model(test_inputs[own]).argmax(-1) == test_targets[own]).sum()
    dist.all_reduce(correct)
    return losses, correct.item() / len(test_targets)
