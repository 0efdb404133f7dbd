"""A penalty of the weights with a backward of its own, equal on all ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
ddp = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)))
optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
samples = TensorDataset(torch.randn(96, 8), torch.randint(0, 4, (96,)))
for x, y in DataLoader(samples, 6, sampler=DistributedSampler(samples)):
    optimizer.zero_grad()
    F.cross_entropy(ddp(x), y).backward()
    penalty = 1e-3 * sum(parameter.abs().sum() for parameter in ddp.parameters())
    penalty.backward()
    optimizer.step()
dist.destroy_process_group()
