"""Activation checkpointing under DDP: use_reentrant=False.

torchrun --standalone --nproc_per_node=2 runs/questions/checkpointing.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class Twice(nn.Module):
    """A layer that runs twice, each time in a checkpoint."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.layer = nn.Linear(4, 4)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = self.embed(x)
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=self.use_reentrant)
        return x


dist.init_process_group("gloo")
ddp = DistributedDataParallel(Twice(use_reentrant=False))
ddp(torch.randn(2, 4)).sum().backward()
gradients = [torch.empty(4, 4) for _ in range(2)]
dist.all_gather(gradients, ddp.module.layer.weight.grad)
assert torch.equal(gradients[0], gradients[1])

ddp = DistributedDataParallel(Twice(use_reentrant=True))
try:
    ddp(torch.randn(2, 4)).sum().backward()
    raise SystemExit("no error")
except RuntimeError as error:
    assert "mark a variable ready only once" in str(error)
del ddp
dist.destroy_process_group()
