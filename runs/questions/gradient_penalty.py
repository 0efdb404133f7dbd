"""A gradient penalty leaves the last bias without a gradient.

torchrun --standalone --nproc_per_node=2 runs/questions/gradient_penalty.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
critic = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
ddp = DistributedDataParallel(critic)


def penalty(ddp):
    x = torch.randn(5, 3, requires_grad=True)
    output = ddp(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean(), output


loss, output = penalty(ddp)
(loss + 0 * output.sum()).backward()  # so that every parameter has a part
assert not critic[2].bias.grad.any()

ddp.zero_grad()
loss, output = penalty(ddp)
loss.backward()
try:
    penalty(ddp)
    raise SystemExit("no error")
except RuntimeError as error:
    assert "finished reduction in the prior iteration" in str(error)
del ddp
dist.destroy_process_group()
