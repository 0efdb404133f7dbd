"""The loop to copy: accumulation, clipping, GradScaler, a short last group.

torchrun --standalone --nproc_per_node=2 runs/pytorch/08_accumulation.py
"""

import copy
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train_epoch(ddp, optimizer, scaler, loader, k):
    """A step after every k micro-batches, and one after what is left."""
    for i, (inputs, targets) in enumerate(loader):
        first = i - i % k  # of this step's micro-batches
        count = min(k, len(loader) - first)
        last = i == first + count - 1
        with nullcontext() if last else ddp.no_sync():
            loss = nn.functional.mse_loss(ddp(inputs), targets) / count
            scaler.scale(loss).backward()
        if last:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(ddp.parameters(), max_norm=1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    size = dist.get_world_size()
    samples = 2 * size
    batches = [(torch.randn(samples, 3), torch.randn(samples, 1)) for _ in range(7)]
    model = nn.Linear(3, 1)
    alone = copy.deepcopy(model)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for group in batches[:3], batches[3:6], batches[6:]:
        inputs, targets = map(torch.cat, zip(*group, strict=True))
        nn.functional.mse_loss(alone(inputs), targets).backward()
        nn.utils.clip_grad_norm_(alone.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()

    mine = slice(dist.get_rank(), None, size)  # two of each batch's samples
    loader = [(inputs[mine], targets[mine]) for inputs, targets in batches]
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    train_epoch(ddp, optimizer, scaler, loader, k=3)
    torch.testing.assert_close(model.weight, alone.weight)
    del ddp
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
