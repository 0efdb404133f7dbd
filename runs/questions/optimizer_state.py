"""Rank 0 has loaded the optimizer's state: send it to the others.

torchrun --standalone --nproc_per_node=2 runs/questions/optimizer_state.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
ddp = DistributedDataParallel(nn.Linear(4, 1))  # copies weights and buffers
optimizer = torch.optim.Adam(ddp.parameters(), lr=0.1)
if rank == 0:  # as if it came out of a file that only rank 0 can read
    ddp.module(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

states = [optimizer.state_dict() if rank == 0 else None]
dist.broadcast_object_list(states, src=0)  # DDP does not do this
optimizer.load_state_dict(states[0])
for parameter in ddp.module.parameters():
    dist.broadcast(parameter.detach(), src=0)

ddp(torch.randn(8, 4)).sum().backward()
optimizer.step()
weights = [torch.empty(1, 4) for _ in range(2)]
dist.all_gather(weights, ddp.module.weight.detach())
assert torch.equal(weights[0], weights[1])
del ddp
dist.destroy_process_group()
