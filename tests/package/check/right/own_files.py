"""Each rank has a file of its own, as many samples in each, shuffled by its seed."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(50 + rank)
parts = [TensorDataset(torch.randn(12, 4) + rank / 10) for _ in range(2)]
loader = DataLoader(ConcatDataset(parts), batch_size=6, shuffle=True, drop_last=True)
ddp = nn.parallel.DistributedDataParallel(
    nn.Sequential(nn.Linear(4, 6), nn.SiLU(), nn.Linear(6, 1))
)
optimizer = torch.optim.NAdam(ddp.parameters())
for epoch in range(3):
    for (x,) in loader:
        optimizer.zero_grad()
        ddp(x).exp().mean().backward()
        optimizer.step()
    with torch.no_grad():
        total = ddp(x).sum()
    dist.reduce(total, dst=0)
dist.destroy_process_group()
