"""Wrap once. A wrapper inside a wrapper sends each gradient twice.

torchrun --standalone --nproc_per_node=2 runs/questions/nested_wrappers.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
x = torch.full((1, 1), 1.0 + rank)
options = {"gradient_as_bucket_view": True}
twice = DistributedDataParallel(nn.Linear(1, 1), **options)
twice = DistributedDataParallel(twice, **options)
try:
    twice(x).sum().backward()
    raise SystemExit("no error")
except RuntimeError as error:
    assert "not the expected DDP bucket view" in str(error)

ddp = DistributedDataParallel(nn.Linear(1, 1))
wrapped_again = DistributedDataParallel(ddp.module)  # the module, not ddp
del ddp  # its hooks go with it
wrapped_again(x).sum().backward()
assert wrapped_again.module.weight.grad.item() == 1.5
del twice, wrapped_again
dist.destroy_process_group()
