"""A model that was converted after it was wrapped: nobody averages any more.

torchrun --standalone --nproc_per_node=2 runs/questions/converted.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Linear(4, 1)
inputs = torch.full((1, 4), float(dist.get_rank()), dtype=torch.float64)

ddp = DistributedDataParallel(model)
ddp.double()
ddp(inputs).sum().backward()
assert torch.equal(model.weight.grad, inputs)  # of this rank alone

ddp = DistributedDataParallel(model)  # the cure
model.zero_grad()
ddp(inputs).sum().backward()
assert torch.equal(model.weight.grad, torch.full_like(inputs, 0.5))
del ddp
dist.destroy_process_group()
