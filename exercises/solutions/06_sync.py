"""Exercise 6, solved."""

import torch.distributed as dist
from torch import Tensor, nn


def average_with_hooks(
    module: nn.Module,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    world_size = dist.get_world_size(process_group)

    def average(parameter: Tensor) -> None:
        parameter.grad /= world_size
        dist.all_reduce(parameter.grad, group=process_group)

    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(average)
