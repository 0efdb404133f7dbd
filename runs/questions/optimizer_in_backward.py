"""An optimizer that steps inside backward steps with this rank's gradient.

torchrun --standalone --nproc_per_node=2 runs/questions/optimizer_in_backward.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
weight = ddp.module.weight
optimizer = torch.optim.SGD([weight], lr=0.1)


def step(parameter):
    optimizer.step()
    optimizer.zero_grad()


weight.register_post_accumulate_grad_hook(step)
ddp(torch.full((1, 1), 1.0 + rank)).sum().backward()

weights = [torch.empty_like(weight) for _ in range(2)]
dist.all_gather(weights, weight.detach())
assert not torch.equal(weights[0], weights[1])  # the replicas have parted
del ddp
dist.destroy_process_group()
