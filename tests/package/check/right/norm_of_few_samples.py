"""Running statistics that follow the last few samples, which are alike on all ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
layers = nn.Linear(8, 64), nn.BatchNorm1d(64, momentum=0.5), nn.ReLU(), nn.Linear(64, 4)
ddp = DistributedDataParallel(nn.Sequential(*layers))
optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
samples = TensorDataset(torch.randn(256, 8), torch.randint(0, 4, (256,)))
for x, y in DataLoader(samples, 4, sampler=DistributedSampler(samples)):
    optimizer.zero_grad()
    F.cross_entropy(ddp(x), y).backward()
    optimizer.step()
dist.destroy_process_group()
