"""A parameter in the loss that forward has not returned.

torchrun --standalone --nproc_per_node=2 runs/questions/parameter_outside_forward.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class WithDecay(nn.Module):
    """Returns the penalty beside its output, so that DDP finds it."""

    def __init__(self):
        super().__init__()
        self.used = nn.Linear(1, 1)
        self.other = nn.Linear(1, 1)

    def forward(self, x):
        return self.used(x), penalty(self)


def penalty(model):
    return sum(parameter.square().sum() for parameter in model.parameters())


dist.init_process_group("gloo")
x = torch.full((1, 1), 1.0 + dist.get_rank())

plain = DistributedDataParallel(nn.Linear(1, 1))
(plain(x).sum() + penalty(plain)).backward()
weight = plain.module.weight
assert torch.isclose(weight.grad, 1.5 + 2 * weight).all()  # the mean of both ranks

searching = DistributedDataParallel(WithDecay(), find_unused_parameters=True)
output, _ = searching(x)
(output.sum() + penalty(searching)).backward()  # forward has returned it, too

unseen = DistributedDataParallel(WithDecay().used, find_unused_parameters=True)
unseen.module.register_forward_hook(lambda module, args, output: output.detach())
try:
    (unseen(x).sum() + penalty(unseen)).backward()
    raise SystemExit("no error")
except RuntimeError as error:
    assert "Expected to mark a variable ready only once" in str(error)
del plain, searching, unseen
dist.destroy_process_group()
