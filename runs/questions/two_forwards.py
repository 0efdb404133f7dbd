"""Two forward passes: add their losses, or keep the first inside no_sync.

torchrun --standalone --nproc_per_node=2 runs/questions/two_forwards.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
real = torch.full((1, 1), 1.0 + rank)
fake = torch.full((1, 1), 10.0 + rank)

(ddp(real).sum() + ddp(fake).sum()).backward()
assert ddp.module.weight.grad.item() == 1.5 + 10.5  # both are means

ddp.zero_grad()
with ddp.no_sync():
    ddp(real).sum().backward()  # adds up here
ddp(fake).sum().backward()  # averages what has added up
assert ddp.module.weight.grad.item() == 1.5 + 10.5

ddp.zero_grad()
of_real = ddp(real).sum()
of_fake = ddp(fake).sum()
of_real.backward()  # averaged
of_fake.backward()  # not
assert ddp.module.weight.grad.item() == 1.5 + 10.0 + rank
del ddp
dist.destroy_process_group()
