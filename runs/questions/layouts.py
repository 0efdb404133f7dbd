"""A weight that lies in memory in another order on one rank.

torchrun --standalone --nproc_per_node=2 runs/questions/layouts.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.Conv2d(2, 3, kernel_size=3)
if rank == 0:  # as a checkpoint that only one rank has loaded may leave it
    model.to(memory_format=torch.channels_last)

model.to(memory_format=torch.channels_last)  # on every rank, before wrapping
ddp = DistributedDataParallel(model)
ddp(torch.randn(1, 2, 5, 5)).sum().backward()
del ddp
dist.destroy_process_group()
