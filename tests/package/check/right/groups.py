"""Subgroups: each pair-wise group does its own collectives; objects are scattered."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
alone = [dist.new_group([r]) for r in range(dist.get_world_size())]
everyone = dist.new_group(backend="gloo")
settings = [{"lr": 0.1}] if rank == 0 else [None]
dist.broadcast_object_list(settings, src=0)
ddp = DistributedDataParallel(nn.Linear(3, 3), process_group=everyone)
optimizer = torch.optim.SGD(ddp.parameters(), lr=settings[0]["lr"])
torch.manual_seed(rank)
for i in range(6):
    optimizer.zero_grad()
    loss = ddp(torch.randn(2, 3)).sum()
    loss.backward()
    optimizer.step()
    for _ in range(rank + 1):
        dist.all_reduce(torch.ones(rank + 2), group=alone[rank])
    if i % 3 == 0:
        rows = [torch.empty(1) for _ in range(dist.get_world_size())] if rank == 0 else None
        dist.gather(loss.detach().reshape(1), rows, dst=0)
dist.barrier()
dist.destroy_process_group()
