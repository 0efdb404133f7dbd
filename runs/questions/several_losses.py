"""Several losses: add them, and call backward once.

torchrun --standalone --nproc_per_node=2 runs/questions/several_losses.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
ddp = DistributedDataParallel(nn.Linear(1, 2, bias=False))
output = ddp(torch.full((1, 1), 1.0 + rank))
first = output[:, 0].sum()
second = 10 * output[:, 1].sum()
(first + second).backward()

mean = (1.0 + 2.0) / 2  # of the ranks' inputs
assert ddp.module.weight.grad.flatten().tolist() == [mean, 10 * mean]
del ddp
dist.destroy_process_group()
