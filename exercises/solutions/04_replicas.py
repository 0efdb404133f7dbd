"""Our solution of exercise 4.4: the ranks combine their verdicts before any of them raises."""

import torch
import torch.distributed as dist
from torch import nn


def verify(module: nn.Module) -> None:
    """Raise `ValueError` on every rank if a parameter differs from rank 0's on any rank."""
    for name, parameter in module.named_parameters():
        reference = parameter.detach().clone()
        dist.broadcast(reference, src=0)
        differs = torch.tensor(not torch.equal(parameter, reference), dtype=torch.uint8)
        differs = differs.to(parameter.device)
        dist.all_reduce(differs, dist.ReduceOp.MAX)
        if differs:
            raise ValueError(f"parameter {name!r} is not the same on all ranks")
