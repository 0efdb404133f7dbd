"""FullyShardedDataParallel, with the parameters' own names."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

dist.init_process_group("gloo")
torch.manual_seed(0)
model = FullyShardedDataParallel(
    nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)),
    device_id=torch.device("cpu"),
    use_orig_params=True,
    sharding_strategy=ShardingStrategy.FULL_SHARD,
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
torch.manual_seed(int(os.environ["RANK"]))
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(4, 6)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
