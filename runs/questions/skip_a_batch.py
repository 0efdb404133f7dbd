"""A rank that cannot use its batch: all leave the step out, or none.

torchrun --standalone --nproc_per_node=2 runs/questions/skip_a_batch.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
ddp = DistributedDataParallel(nn.Linear(1, 1))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
batches = [1.0, float("nan") if rank == 1 else 2.0, 3.0]
steps = 0
for batch in batches:
    x = torch.full((1, 1), batch)
    loss = ddp(x).sum()
    usable = torch.tensor(float(loss.isfinite()))
    dist.all_reduce(usable, op=dist.ReduceOp.MIN)  # 1 only if it is on all
    if not usable:
        continue  # before backward, on every rank
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    steps += 1
assert steps == 2
del ddp
dist.destroy_process_group()
