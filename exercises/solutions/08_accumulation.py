"""A solution of exercise 8."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

MeanLoss = Callable[[DistributedDataParallel, Tensor], Tensor]


def accumulate(
    ddp: DistributedDataParallel,
    mean_loss: MeanLoss,
    micro_batches: Sequence[Tensor],
) -> None:
    count = sum(len(batch) for batch in micro_batches)
    tokens = torch.tensor(count, device=micro_batches[0].device)
    dist.all_reduce(tokens)
    for i, batch in enumerate(micro_batches):
        is_last = i + 1 == len(micro_batches)
        with nullcontext() if is_last else ddp.no_sync():
            share = len(batch) / tokens.item()
            loss = mean_loss(ddp, batch) * share * dist.get_world_size()
            loss.backward()
