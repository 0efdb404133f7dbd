"""torch.compile before or after wrapping: the same gradients, the same names.

torchrun --standalone --nproc_per_node=2 runs/questions/compiled.py
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
torch.manual_seed(dist.get_rank())
x = torch.randn(8, 4)
options = {"backend": "eager"}  # leave this out where there is a compiler

compiled = copy.deepcopy(model)
compiled.compile(**options)  # in place: the same module
before = DistributedDataParallel(compiled)
before(x).sum().backward()
wrapped = DistributedDataParallel(copy.deepcopy(model))
after = torch.compile(wrapped, **options)
after(x).sum().backward()

for one, other in zip(after.parameters(), before.parameters(), strict=True):
    assert torch.equal(one.grad, other.grad)
assert next(iter(before.module.state_dict())) == "0.weight"
assert next(iter(torch.compile(model).state_dict())) == "_orig_mod.0.weight"
del wrapped, after, before
dist.destroy_process_group()
