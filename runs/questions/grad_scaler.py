"""GradScaler under DDP: backward, unscale, clip, step, update.

torchrun --standalone --nproc_per_node=2 runs/questions/grad_scaler.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
start = ddp.module.weight.item()


def train_step(ddp, x):
    loss = ddp(torch.full((1, 1), x)).sum()
    scaler.scale(loss).backward()  # the mean of scaled gradients
    scaler.unscale_(optimizer)  # before clipping, which is of the mean
    norm = nn.utils.clip_grad_norm_(ddp.parameters(), max_norm=1.0)
    scaler.step(optimizer)  # leaves the step out if one is inf or NaN
    scaler.update()
    optimizer.zero_grad()
    return norm.item()


assert train_step(ddp, 2.0 + 2.0 * rank) == 3.0  # of the mean, not scaled
assert abs(ddp.module.weight.item() - (start - 0.1)) < 1e-6
moved = ddp.module.weight.item()
train_step(ddp, 1.0 if rank == 0 else float("inf"))
assert ddp.module.weight.item() == moved  # all ranks leave it out together
assert scaler.get_scale() == 2.0
del ddp
dist.destroy_process_group()
