"""A critic's two losses of one batch are added up, the first within no_sync."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(48, 4))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=4, sampler=sampler)
critic = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.Adam(critic.parameters())
torch.manual_seed(1 + dist.get_rank())
for (x,) in loader:
    optimizer.zero_grad()
    with critic.no_sync():
        critic(torch.randn(4, 4)).mean().backward()
    (1 - critic(x)).mean().backward()
    optimizer.step()
dist.destroy_process_group()
