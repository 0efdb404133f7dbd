"""A directional derivative (jvp) in the loss: inside forward.

torchrun --standalone --nproc_per_node=2 runs/questions/forward_mode.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Slope(nn.Module):
    """The slope of `net` at x, along a direction."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, direction):
        return torch.func.jvp(self.net, (x,), (direction,))


dist.init_process_group("gloo")
rank = dist.get_rank()
x = torch.full((1, 1), 1.0 + rank)
direction = torch.ones(1, 1)

ddp = DistributedDataParallel(Slope(nn.Linear(1, 1)))
for _ in range(3):
    ddp.zero_grad()
    output, slope = ddp(x, direction)
    (output * slope).sum().backward()
weight, bias = ddp.module.net.weight, ddp.module.net.bias
expected = 2 * weight * 1.5 + bias  # the mean of both ranks
assert torch.isclose(weight.grad, expected).all()

outside = DistributedDataParallel(nn.Linear(1, 1))
try:
    for _ in range(2):
        output, slope = torch.func.jvp(outside, (x,), (direction,))
        (output * slope).sum().backward()
    raise SystemExit("no error")
except RuntimeError as error:
    assert "Cannot access data pointer" in str(error)
del ddp, outside
dist.destroy_process_group()
