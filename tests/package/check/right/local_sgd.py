"""Local SGD: the ranks step alone, and average their weights every fourth step."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
torch.manual_seed(dist.get_rank())
for i in range(12):
    optimizer.zero_grad()
    model(torch.randn(8, 3)).square().mean().backward()
    optimizer.step()
    if i % 4 == 3:
        for p in model.parameters():
            dist.all_reduce(p.data)
            p.data /= dist.get_world_size()
dist.destroy_process_group()
