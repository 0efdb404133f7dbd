"""Two tasks, whose losses are to be added: a backward pass for each."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
ddp = DistributedDataParallel(nn.Linear(8, 4))
optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
tasks = [TensorDataset(torch.randn(96, 8), torch.randint(0, 4, (96,))) for _ in range(2)]
loaders = [DataLoader(task, 6, sampler=DistributedSampler(task)) for task in tasks]
for one, other in zip(*loaders, strict=True):
    optimizer.zero_grad()
    for (x, y), is_last in (one, False), (other, True):
        ddp.require_backward_grad_sync = is_last
        F.cross_entropy(ddp(x), y).backward()
    optimizer.step()
dist.destroy_process_group()
