"""Buffers that differ from rank to rank: nobody copies them.

torchrun --standalone --nproc_per_node=2 runs/questions/buffers_of_each_rank.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.Linear(1, 1)
model.register_buffer("graph", torch.eye(2 + rank).to_sparse())
ddp = DistributedDataParallel(model, broadcast_buffers=False)
for _ in range(2):
    ddp.zero_grad()
    ddp(torch.full((1, 1), 1.0 + rank)).sum().backward()
assert model.graph.shape == (2 + rank, 2 + rank)
assert model.weight.grad.item() == 1.5  # the gradients are averaged as ever
del ddp
dist.destroy_process_group()
