"""A solution of exercise 15."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from miniddp import ring


def flat(tensors: Sequence[Tensor], world_size: int) -> Tensor:
    vector = torch.cat([tensor.reshape(-1) for tensor in tensors])
    return F.pad(vector, (0, -len(vector) % world_size))


def shard_of(
    parameters: Sequence[Tensor],
    process_group: dist.ProcessGroup | None = None,
) -> nn.Parameter:
    world_size = dist.get_world_size(process_group)
    whole = flat([parameter.detach() for parameter in parameters], world_size)
    own = whole.chunk(world_size)[dist.get_rank(process_group)]
    return nn.Parameter(own.clone())


@torch.no_grad()
def sharded_step(
    parameters: Sequence[Tensor],
    shard: nn.Parameter,
    optimizer,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    world_size = dist.get_world_size(process_group)
    gradient = flat([parameter.grad for parameter in parameters], world_size)
    gradient /= world_size
    shard.grad = torch.empty_like(shard)
    parts = gradient.chunk(world_size)
    ring.reduce_scatter(shard.grad, parts, group=process_group)
    optimizer.step()
    whole = torch.empty_like(gradient)
    parts = whole.chunk(world_size)
    ring.all_gather(parts, shard.detach(), group=process_group)
    sizes = [parameter.numel() for parameter in parameters]
    views = whole.split([*sizes, len(whole) - sum(sizes)])
    for parameter, values in zip(parameters, views, strict=False):
        parameter.copy_(values.view_as(parameter))
        parameter.grad = None
    shard.grad = None
