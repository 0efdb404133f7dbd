"""A weight that lies in memory in another order on one rank, or since the wrapping.

torchrun --standalone --nproc_per_node=2 runs/questions/layouts.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
x = torch.arange(50.0).reshape(1, 2, 5, 5)
model = nn.Conv2d(2, 3, kernel_size=3)
if rank == 0:  # as a checkpoint that only one rank has loaded may leave it
    model.to(memory_format=torch.channels_last)

model.to(memory_format=torch.channels_last)  # on every rank, before wrapping
ddp = DistributedDataParallel(model)
ddp(x).sum().backward()

late = DistributedDataParallel(nn.Conv2d(2, 3, kernel_size=3))
late.to(memory_format=torch.channels_last)  # on every rank, after wrapping
late(x).sum().backward()  # torch warns, and mixes up the elements
assert not torch.equal(late.module.weight.grad, model.weight.grad)
assert late.module.weight.grad.sum() == model.weight.grad.sum()
del ddp, late
dist.destroy_process_group()
