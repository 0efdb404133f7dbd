"""Lazy modules need one forward pass before they are wrapped.

torchrun --standalone --nproc_per_node=2 runs/questions/lazy_modules.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2))
try:
    DistributedDataParallel(model)
    raise SystemExit("no error")
except RuntimeError as error:
    assert "uninitialized parameters" in str(error)

with torch.no_grad():
    model(torch.ones(1, 3))  # its shapes are known from here on
ddp = DistributedDataParallel(model)
ddp(torch.ones(2, 3)).sum().backward()
del ddp
dist.destroy_process_group()
