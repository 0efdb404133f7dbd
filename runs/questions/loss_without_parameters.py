"""A rank whose loss uses no parameter still has to take part.

torchrun --standalone --nproc_per_node=2 runs/questions/loss_without_parameters.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
targets = torch.tensor([4.0]) if rank == 0 else torch.empty(0)
output = ddp(torch.ones(1, 1))[: len(targets), 0]
loss = (output * targets).sum()  # on rank 1 a sum of nothing: 0
loss.backward()  # which depends on the weight all the same

assert ddp.module.weight.grad.item() == (4.0 + 0.0) / 2
del ddp
dist.destroy_process_group()
