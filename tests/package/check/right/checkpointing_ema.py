"""Activation checkpointing, a moving average of the weights, warm-up by LambdaLR."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)

    def forward(self, x):
        return checkpoint(lambda y: self.second(self.first(y).relu()), x, use_reentrant=False)


dist.init_process_group("gloo")
torch.manual_seed(1 + dist.get_rank())
ddp = DistributedDataParallel(nn.Sequential(Block(), nn.Linear(6, 1)), static_graph=True)
ema = copy.deepcopy(ddp.module).requires_grad_(False)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3, fused=False)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 5))
for _ in range(9):
    loss = ddp(torch.randn(4, 6)).mean()
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for average, value in zip(ema.parameters(), ddp.module.parameters(), strict=True):
            average.lerp_(value, 0.1)
        ema(torch.randn(4, 6))
if dist.get_rank() == 0:
    torch.save({"ema": ema.state_dict(), "opt": optimizer.state_dict()}, "/dev/null")
dist.barrier()
dist.destroy_process_group()
