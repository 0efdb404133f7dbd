"""Means over micro-batches and ranks of unequal size: add up sums and counts, never means."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from miniddp.process import check_group, device

Group = dist.ProcessGroup | None


def global_mean(
    total: torch.Tensor, count: int | torch.Tensor, process_group: Group = None
) -> torch.Tensor:
    """The mean over all ranks' samples (or tokens), of which this rank has `count`, summing to
    `total`.

    `total` may have any shape; the mean has it too, in float64. A rank may have no sample: it
    passes zeros.

    Raises `ValueError`, on every rank, if no rank has any.
    """
    check_group(process_group)
    sums = torch.cat([total.detach().double().reshape(-1), total.new_tensor([count]).double()])
    dist.all_reduce(sums, group=process_group)
    if sums[-1] == 0:
        raise ValueError("there is no mean of nothing: no rank has a sample")
    return (sums[:-1] / sums[-1]).reshape(total.shape)


def mean_weights(counts: Sequence[int], process_group: Group = None) -> list[float]:
    """What to multiply the mean losses of this rank's micro-batches by, so that all samples count
    the same.

    `counts[i]` is the number of samples (or of tokens that the loss counts) of micro-batch i. If
    each rank accumulates the gradients of `weight * mean loss`, the mean of those gradients over
    the ranks, which is what DDP computes, is the gradient of the mean over all samples of all
    ranks. Where all counts are equal, each weight is 1 / number of micro-batches.

    Raises `ValueError`, on every rank, if no rank has a sample.
    """
    check_group(process_group)
    total = torch.tensor(sum(counts), device=device())
    dist.all_reduce(total, group=process_group)
    if total == 0:
        raise ValueError("there is no mean of nothing: no rank has a sample")
    world_size = dist.get_world_size(process_group)
    return [count * world_size / total.item() for count in counts]
