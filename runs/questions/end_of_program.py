"""A program that has done its work, and hangs or aborts at its last line.

torchrun --standalone --nproc_per_node=2 runs/questions/end_of_program.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
ddp = DistributedDataParallel(nn.Linear(4, 1))
ddp(torch.randn(8, 4)).sum().backward()
group = dist.group.WORLD
assert group.size() == 2  # ddp holds this group, as does torch's list
del ddp  # first the wrapper,
dist.destroy_process_group()  # then the group, whose threads end here
