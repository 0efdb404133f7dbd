"""Means over micro-batches and ranks of unequal size: sums over counts."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from miniddp.process import Group, check_group, device


@torch.no_grad()
def global_mean(
    total: Tensor, count: int | Tensor, process_group: Group = None
) -> Tensor:
    """The mean over the samples (or tokens) of all ranks, in float64.

    This rank has `count` of them, perhaps none, whose values add up to `total`,
    of any dtype and of the mean's shape. Raises `ValueError`, on every rank, if
    no rank has any.
    """
    check_group(process_group)
    sums = total.double().reshape(-1)
    counts = torch.as_tensor(count, device=total.device).double().reshape(1)
    sums = torch.cat([sums, counts])
    dist.all_reduce(sums, group=process_group)
    if sums[-1] == 0:
        raise ValueError("there is no mean of nothing: no rank has a sample")
    return (sums[:-1] / sums[-1]).reshape(total.shape)


def mean_weights(
    counts: Sequence[int], process_group: Group = None
) -> list[float]:
    """What to multiply the mean losses of this rank's micro-batches by.

    `counts[i]` is the number of samples (or of tokens that the loss counts) of
    micro-batch i. From the gradients of `weight * mean loss`, accumulated, DDP
    makes the gradient of the mean over all samples of all ranks. Equal counts
    weigh 1 / number of micro-batches. Raises `ValueError`, on every rank, if no
    rank has a sample.
    """
    check_group(process_group)
    total = torch.tensor(sum(counts), device=device())
    dist.all_reduce(total, group=process_group)
    if total == 0:
        raise ValueError("there is no mean of nothing: no rank has a sample")
    samples = int(total)
    world_size = dist.get_world_size(process_group)
    return [count * world_size / samples for count in counts]
