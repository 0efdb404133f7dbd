"""Case 4: a collective that only rank 0 calls."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from instruments.toy import loss_of, own_batches, small_model, train


def evaluate_on_rank_0(rank: int) -> float | None:
    ddp = DistributedDataParallel(small_model())
    train(ddp, own_batches(rank, 2))
    mean = None
    if rank == 0:
        mean = evaluate(ddp.module, own_batches(rank, 1)[0])
        print(f"mean loss {mean:.4f}")
    dist.barrier()
    return mean


def evaluate(model: nn.Module, inputs: Tensor) -> float:
    with torch.no_grad():
        loss = loss_of(model(inputs)) / dist.get_world_size()
    dist.all_reduce(loss)
    return loss.item()


def evaluate_on_all_ranks(rank: int) -> float:
    ddp = DistributedDataParallel(small_model())
    train(ddp, own_batches(rank, 2))
    mean = evaluate(ddp.module, own_batches(rank, 1)[0])
    if rank == 0:
        print(f"mean loss {mean:.4f}")
    dist.barrier()
    return mean
