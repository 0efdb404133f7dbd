"""Communication hooks: ways to average a bucket of gradients.

Names and calling convention are those of
`torch.distributed.algorithms.ddp_comm_hooks`: `hook(state, bucket)` gets this
rank's gradients, not yet divided, and returns a future of their mean.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future

from miniddp.process import Group

Mean = Future[Tensor]
Hook = Callable[[Any, Any], Mean]


def allreduce_hook(process_group: Group, bucket: GradBucket) -> Mean:
    """The mean, by one all-reduce: what DDP does without a hook."""
    return _average(bucket.buffer(), process_group)


def fp16_compress_hook(process_group: Group, bucket: GradBucket) -> Mean:
    """Send float16: 2 bytes per element, 11 significant bits."""
    return _compressed(torch.float16, process_group, bucket)


def bf16_compress_hook(process_group: Group, bucket: GradBucket) -> Mean:
    """Send bfloat16: 2 bytes, float32's range with 8 significant bits."""
    return _compressed(torch.bfloat16, process_group, bucket)


def noop_hook(_: Any, bucket: GradBucket) -> Mean:
    """Send nothing: a bound for what communication can cost at most."""
    return _done(bucket.buffer())


def _done(value: Tensor) -> Mean:
    future: Mean = Future(devices=[value.device] if value.is_cuda else None)
    future.set_result(value)
    return future


def _average(tensor: Tensor, process_group: Group) -> Mean:
    """Divide, then add: the sum of undivided float16 could overflow."""
    numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    numbers.div_(dist.get_world_size(process_group))
    work = dist.all_reduce(tensor, group=process_group, async_op=True)
    future: Mean = work.get_future().then(lambda _: tensor)
    return future


def _compressed(
    dtype: torch.dtype, process_group: Group, bucket: GradBucket
) -> Mean:
    buffer = bucket.buffer()
    numbers = torch.view_as_real(buffer) if buffer.is_complex() else buffer

    def restore(future: Mean) -> Tensor:
        numbers.copy_(future.value())
        return buffer

    return _average(numbers.to(dtype), process_group).then(restore)


def wait_for(future: Any, bucket: Any) -> None:
    """Wait until the bucket holds the mean that a hook's future gives.

    Raises `RuntimeError` if the hook returned something else.
    """
    if isinstance(future, dist.Work):
        future.wait()
        return
    if not isinstance(future, torch._C.Future):
        raise RuntimeError(
            "callback must return a torch.futures.Future object, but got "
            f"{type(future).__name__}"
        )
    result: Any = future.wait()
    mean = result[0] if isinstance(result, (list, tuple)) else result
    buffer = bucket.buffer()
    if not isinstance(mean, Tensor) or mean.numel() != buffer.numel():
        raise RuntimeError(
            "the future of a communication hook must hold a tensor of "
            f"{buffer.numel()} elements, but got {mean!r:.80}"
        )
    if mean.data_ptr() != buffer.data_ptr():
        buffer.copy_(mean)


@dataclass
class PowerSGDState:
    """What `powerSGD_hook` keeps from step to step, with error feedback.

    Args:
        process_group: the ranks; the default group if None.
        matrix_approximation_rank: the rank r of the approximation.
        start_powerSGD_iter: backward passes with a plain all-reduce first, at
            least 2: the first one is followed by a rebuild of the buckets.
    """

    process_group: Group
    matrix_approximation_rank: int = 1
    start_powerSGD_iter: int = 10  # noqa: N815
    iteration: int = field(default=0, init=False)
    errors: dict[int, list[Tensor]] = field(default_factory=dict, init=False)
    qs: dict[int, list[Tensor]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.matrix_approximation_rank < 1 or self.start_powerSGD_iter < 2:
            raise ValueError(
                "matrix_approximation_rank must be at least 1 and "
                "start_powerSGD_iter at least 2, not "
                f"{self.matrix_approximation_rank} and "
                f"{self.start_powerSGD_iter}"
            )


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Mean:  # noqa: N802
    """Send a low-rank approximation P·Qᵀ of every large matrix.

    It waits for its all-reduces, so nothing of it overlaps with backward. As
    in torch, one gradient that is inf or NaN stays in the error feedback for
    good: a GradScaler, which lets some steps overflow, does not go with it.
    Source: Vogels et al., PowerSGD, NeurIPS 2019, algorithms 1 and 2.
    """
    group, rank = state.process_group, state.matrix_approximation_rank
    if state.iteration < state.start_powerSGD_iter:
        state.iteration += bucket.is_last()
        return allreduce_hook(group, bucket)

    index, gradients = bucket.index(), bucket.gradients()
    matrices = [g.flatten(1) for g in gradients if _is_large(g, rank)]
    others = [g for g in gradients if not _is_large(g, rank)]
    if index not in state.qs:
        same = torch.Generator().manual_seed(0)  # on all ranks
        state.qs[index] = [
            torch.randn(matrix.shape[1], rank, generator=same).to(matrix)
            for matrix in matrices
        ]
        state.errors[index] = [torch.zeros_like(matrix) for matrix in matrices]
    errors = state.errors[index]
    for matrix, error in zip(matrices, errors, strict=True):
        matrix.add_(error)
    qs = [_orthonormal(q) for q in state.qs[index]]
    ps = [m @ q for m, q in zip(matrices, qs, strict=True)]
    _average_together(ps + others, group)
    ps = [_orthonormal(p) for p in ps]
    qs = [m.mH @ p for m, p in zip(matrices, ps, strict=True)]
    _average_together(qs, group)
    state.qs[index] = qs
    for matrix, error, p, q in zip(matrices, errors, ps, qs, strict=True):
        approximation = p @ q.mH
        torch.sub(matrix, approximation, out=error)
        matrix.copy_(approximation)
    return _done(bucket.buffer())


def _is_large(gradient: Tensor, rank: int) -> bool:
    """Whether P and Q together have less than half of its elements."""
    if gradient.dim() < 2 or not gradient.is_contiguous():
        return False
    return 2 * rank * sum(gradient.flatten(1).shape) < gradient.numel()


def _orthonormal(matrix: Tensor) -> Tensor:
    exact = torch.promote_types(matrix.dtype, torch.float32)  # or complex
    q: Tensor = torch.linalg.qr(matrix.to(exact)).Q
    return q.to(matrix.dtype)


def _average_together(tensors: Sequence[Tensor], process_group: Group) -> None:
    """Average tensors in place, in one all-reduce."""
    if not tensors:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    mean = _average(flat, process_group).wait()
    parts = torch.split(mean, [tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))
