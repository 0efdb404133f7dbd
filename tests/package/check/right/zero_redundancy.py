"""Optimizer state in shards: torch's ZeroRedundancyOptimizer."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
ddp = DistributedDataParallel(nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)]))
optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
for _ in range(6):
    optimizer.zero_grad()
    nn.functional.mse_loss(ddp(torch.randn(4, 6)), torch.randn(4, 6)).backward()
    optimizer.step()
optimizer.consolidate_state_dict(to=0)
if dist.get_rank() == 0:
    optimizer.state_dict()
dist.destroy_process_group()
