"""LBFGS, whose step calls a closure several times."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
ddp = DistributedDataParallel(nn.Linear(3, 1).double())
x, y = torch.randn(20, 3).double(), torch.randn(20, 1).double()
optimizer = torch.optim.LBFGS(ddp.parameters(), lr=0.5, max_iter=3)


def closure():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(ddp(x), y)
    loss.backward()
    value = loss.detach().clone()
    dist.all_reduce(value)
    loss.data = value / dist.get_world_size()
    return loss


for _ in range(4):
    optimizer.step(closure)
dist.destroy_process_group()
