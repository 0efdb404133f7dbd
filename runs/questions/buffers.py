"""Buffers are copied from rank 0 before a forward, unless you say no.

torchrun --standalone --nproc_per_node=2 runs/questions/buffers.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Counting(nn.Linear):
    def __init__(self):
        super().__init__(1, 1)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.seen += x.sum()  # each rank sees other numbers
        return super().forward(x)


class Remembering(nn.Linear):
    def forward(self, x):
        self.register_buffer("last", x.clone())
        return super().forward(x)


dist.init_process_group("gloo")
rank = dist.get_rank()
x = torch.full((1, 1), 1.0 + rank)

copied = DistributedDataParallel(Counting())
local = DistributedDataParallel(Counting(), forward_sync_buffers=False)
for _ in range(3):
    copied(x).sum().backward()
    local(x).sum().backward()
assert copied.module.seen.item() == 2.0 + x.item()  # rank 0's, then its own
assert local.module.seen.item() == 3 * x.item()
with copied.no_sync():
    copied(x)  # copies them: the forward before it averages
    copied(x)  # does not
assert copied.module.seen.item() == 3.0 + 2 * x.item()
total = local.module.seen.clone()
dist.all_reduce(total)  # all have seen, once, where you need it
assert total.item() == 9.0
later = DistributedDataParallel(Remembering(1, 1))  # without a buffer so far
later(x).sum().backward()
kept = later.module.last
later(x)
assert kept.item() == x.item()  # rank 0's were not copied
del copied, local, later
dist.destroy_process_group()
