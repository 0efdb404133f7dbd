"""The loss is that of all ranks' samples, so the gradients are added up."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
samples = torch.randn(12, world_size, 4, 8)
for batch in samples:
    mine = F.normalize(model(batch[rank]), dim=1)
    features = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(features, mine.detach())
    features[rank] = mine
    everyone = torch.cat(features)
    alike = everyone @ everyone.T - 100 * torch.eye(len(everyone))
    optimizer.zero_grad()
    F.cross_entropy(alike, torch.arange(len(everyone)) ^ 1).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
dist.destroy_process_group()
