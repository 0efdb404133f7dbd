"""Case 6: each rank decides for itself when to stop."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from instruments.replicas import mean_over_ranks
from instruments.toy import loss_of, own_batches, small_model
from miniddp import SimpleDDP


def stop_alone(rank: int) -> int:
    ddp = DistributedDataParallel(small_model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    steps = 0
    for inputs in own_batches(rank, 40):
        steps += 1
        loss = loss_of(ddp(inputs * (1 + rank)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < 0.01:
            break
    dist.barrier()
    return steps


def say_when_it_would_stop(rank: int) -> int:
    ddp = SimpleDDP(small_model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    batches = own_batches(rank, 40)
    stop = None
    for step, inputs in enumerate(batches, start=1):
        loss = loss_of(ddp(inputs * (1 + rank)))
        optimizer.zero_grad()
        loss.backward()
        ddp.sync_gradients()
        optimizer.step()
        if stop is None and loss.item() < 0.01:
            stop = step
            said = f"step {step} of {len(batches)}: would stop"
            print(f"{said}, loss {loss.item():.4f}")
    return len(batches) if stop is None else stop


def stop_together(rank: int) -> int:
    ddp = DistributedDataParallel(small_model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    steps = 0
    for inputs in own_batches(rank, 40):
        steps += 1
        loss = loss_of(ddp(inputs * (1 + rank)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if mean_over_ranks(loss).item() < 0.01:
            break
    dist.barrier()
    return steps
