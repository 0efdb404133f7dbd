"""Unequal parts get their weights, and clipping is of the mean.

torchrun --standalone --nproc_per_node=2 runs/pytorch/01_averaging.py
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train_step(ddp, optimizer, inputs, targets, global_batch):
    """One update, the same on all ranks, whatever the size of their parts."""
    weight = dist.get_world_size() * len(inputs) / global_batch
    loss = nn.functional.mse_loss(ddp(inputs), targets)
    (weight * loss).backward()  # on return each .grad is the mean of the ranks
    nn.utils.clip_grad_norm_(ddp.parameters(), max_norm=0.1)
    optimizer.step()
    optimizer.zero_grad()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same samples on every rank
    inputs, targets = torch.randn(7, 4), torch.randn(7, 1)
    model = nn.Linear(4, 1)
    alone = copy.deepcopy(model)

    loss = nn.functional.mse_loss(alone(inputs), targets)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(alone.parameters(), max_norm=0.1)
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    assert norm > 0.1  # so that clipping does something

    parts = torch.arange(7).tensor_split(dist.get_world_size())  # 4 and 3
    mine = parts[dist.get_rank()]
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    train_step(ddp, optimizer, inputs[mine], targets[mine], len(inputs))
    torch.testing.assert_close(model.weight, alone.weight)
    del ddp
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
