"""After retain_graph=True the second backward is not averaged.

torchrun --standalone --nproc_per_node=2 runs/questions/retain_graph.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
loss = ddp(torch.full((1, 1), 1.0 + rank)).sum()
loss.backward(retain_graph=True)
assert ddp.module.weight.grad.item() == 1.5  # the mean of 1 and 2
loss.backward()
assert ddp.module.weight.grad.item() == 1.5 + (1.0 + rank)  # and its own

ddp.zero_grad()
loss = ddp(torch.full((1, 1), 1.0 + rank)).sum()
(2 * loss).backward()  # the same, in one backward
assert ddp.module.weight.grad.item() == 3.0
del ddp
dist.destroy_process_group()
