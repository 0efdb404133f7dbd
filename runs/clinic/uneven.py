"""Case 5: one rank has a batch more."""

import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from instruments.replicas import spread
from instruments.toy import own_batches, small_model, train


def train_unevenly(rank: int) -> tuple[int, float]:
    ddp = DistributedDataParallel(small_model())
    batches = own_batches(rank, 4 - rank)
    train(ddp, batches)
    dist.barrier()
    return len(batches), spread(ddp)


def compare_lengths(rank: int) -> list[int]:
    batches = own_batches(rank, 4 - rank)
    lengths: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(lengths, len(batches))
    if rank == 0:
        print("batches per rank:", lengths)
    return lengths


def train_joined(rank: int) -> tuple[int, float]:
    ddp = DistributedDataParallel(small_model())
    batches = own_batches(rank, 4 - rank)
    with Join([ddp]):
        train(ddp, batches)
    dist.barrier()
    return len(batches), spread(ddp)
