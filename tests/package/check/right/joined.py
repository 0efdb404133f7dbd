"""Inputs of unequal number, under torch's Join."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = DDP(nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with Join([model]):
    for _ in range(5 + 3 * rank):
        optimizer.zero_grad()
        model(torch.randn(4, 2)).sum().backward()
        optimizer.step()
dist.destroy_process_group()
