"""Tensor parallel layers on a mesh: both ranks get the same batches, by a sampler for one rank."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 16)
        self.down = nn.Linear(16, 3)

    def forward(self, x):
        return self.down(self.up(x).relu())


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)
model = parallelize_module(MLP(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
optimizer = torch.optim.SGD(model.parameters(), 0.1)
dataset = TensorDataset(torch.randn(48, 6), torch.randint(3, (48,)))
dp = mesh["dp"]
sampler = DistributedSampler(dataset, num_replicas=dp.size(), rank=dp.get_local_rank())
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(dataset, 8, sampler=sampler):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
dist.destroy_process_group()
