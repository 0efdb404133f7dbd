"""The model takes its rank's part of the batch, which all ranks give it."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x):
        return self.linear(x[rank::world_size])


ddp = DistributedDataParallel(Part())
optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
samples = TensorDataset(torch.randn(192, 8), torch.randint(0, 4, (192,)))
for x, y in DataLoader(samples, 16):
    optimizer.zero_grad()
    F.cross_entropy(ddp(x), y[rank::world_size]).backward()
    optimizer.step()
dist.destroy_process_group()
