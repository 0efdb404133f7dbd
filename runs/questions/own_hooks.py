"""A hook of your own sees this rank's gradient, before DDP averages it.

torchrun --standalone --nproc_per_node=2 runs/questions/own_hooks.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
weight = ddp.module.weight
seen = []


def clamp(parameter):
    seen.append(parameter.grad.item())
    parameter.grad.clamp_(max=3.0)


weight.register_post_accumulate_grad_hook(clamp)
ddp(torch.full((1, 1), 2.0 + 4.0 * rank)).sum().backward()

assert seen == [2.0 + 4.0 * rank]  # 2 on rank 0, 6 on rank 1
assert weight.grad.item() == (2.0 + 3.0) / 2  # of the clamped gradients
del ddp
dist.destroy_process_group()
