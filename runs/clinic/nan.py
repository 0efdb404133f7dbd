"""Case 12: one NaN, and every rank is lost."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from instruments.toy import loss_of, own_batches, small_model, train


def step_with_whatever_comes(rank: int) -> bool:
    ddp = DistributedDataParallel(small_model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step, inputs in enumerate(batches_with_a_bad_one(rank)):
        loss = loss_of(ddp(inputs))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.3f}")
    return all(
        parameter.isfinite().all().item() for parameter in ddp.parameters()
    )


def batches_with_a_bad_one(rank: int) -> list[Tensor]:
    batches = own_batches(rank, 4)
    if rank == 1:
        batches[1][0, 0] = float("nan")
    return batches


def name_the_rank(rank: int) -> None:
    ddp = DistributedDataParallel(small_model())
    ddp.register_comm_hook(rank, check_before_sending)
    train(ddp, batches_with_a_bad_one(rank)[:2])


def check_before_sending(rank: int, bucket):
    if not bucket.buffer().isfinite().all():
        print(f"rank {rank} sends what is not finite")
    return default_hooks.allreduce_hook(dist.group.WORLD, bucket)


def skip_the_step_together(rank: int) -> bool:
    ddp = DistributedDataParallel(small_model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step, inputs in enumerate(batches_with_a_bad_one(rank)):
        loss = loss_of(ddp(inputs))
        optimizer.zero_grad()
        loss.backward()
        norm = clip_grad_norm_(ddp.parameters(), max_norm=1.0)
        if norm.isfinite():
            optimizer.step()
        note = "" if norm.isfinite() else " skipped"
        print(f"step {step}: loss {loss.item():.3f}{note}")
    return all(
        parameter.isfinite().all().item() for parameter in ddp.parameters()
    )
