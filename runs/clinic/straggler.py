"""Case 13: one rank has the long sequences."""

import contextlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from instruments.clock import clock
from instruments.toy import loss_of
from miniddp import set_seed
from miniddp.process import device
from miniddp.sampler import shard


def shards_in_blocks(rank: int, probe: bool = False) -> dict[str, float]:
    lengths = lengths_of_the_data()
    mine = [lengths[i] for i in shard(len(lengths), 2, rank, contiguous=True)]
    return work_on(mine, probe)


def lengths_of_the_data() -> list[int]:
    """Sorted, as some data sets come: from 16 to 512 tokens."""
    generator = torch.Generator().manual_seed(0)
    return sorted(torch.randint(16, 513, (64,), generator=generator).tolist())


def work_on(lengths: Sequence[int], probe: bool) -> dict[str, float]:
    """This rank's tokens and seconds. With `probe` no step sends gradients."""
    set_seed(0)
    layers = [nn.Linear(256, 256) for _ in range(4)]
    ddp = DistributedDataParallel(nn.Sequential(*layers).to(device()))
    forward = backward = wait = 0.0
    for length in lengths:
        inputs = torch.ones(4 * length, 256, device=device())
        with ddp.no_sync() if probe else contextlib.nullcontext():
            start = clock()
            loss = loss_of(ddp(inputs))
            after_forward = clock()
            loss.backward()
            after_backward = clock()
        dist.barrier()
        after_barrier = clock()
        forward += after_forward - start
        backward += after_backward - after_forward
        wait += after_barrier - after_backward
    return {
        "tokens": sum(lengths),
        "forward": forward,
        "backward": backward,
        "wait": wait,
    }


def wait_share(times: dict[str, float]) -> float:
    """The part of a rank's time for which it waits for the other."""
    return times["wait"] / (
        times["forward"] + times["backward"] + times["wait"]
    )


def shards_dealt_in_turn(rank: int, probe: bool = False) -> dict[str, float]:
    lengths = lengths_of_the_data()
    mine = [lengths[i] for i in shard(len(lengths), 2, rank)]
    return work_on(mine, probe)
