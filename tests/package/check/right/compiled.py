"""torch.compile around the wrapped model, and around the loss."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@torch.compile(backend="eager")
def loss_of(output, target):
    return (output - target).square().mean()


dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
model = torch.compile(ddp, backend="eager")
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
for _ in range(6):
    optimizer.zero_grad()
    loss_of(model(torch.randn(4, 4)), torch.randn(4, 1)).backward()
    optimizer.step()
dist.destroy_process_group()
