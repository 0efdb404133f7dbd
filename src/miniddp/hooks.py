"""Communication hooks: ways to average a bucket of gradients.

Names and calling convention are those of
`torch.distributed.algorithms.ddp_comm_hooks`: `hook(state, bucket)` gets this
rank's gradients, not yet divided, and returns a future of their mean.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future

Group = dist.ProcessGroup | None
Hook = Callable[[Any, Any], Future[Tensor]]


def allreduce_hook(process_group: Group, bucket: GradBucket) -> Future[Tensor]:
    """The mean, by one all-reduce: what DDP does without a hook."""
    return _average(bucket.buffer(), process_group)


def fp16_compress_hook(
    process_group: Group, bucket: GradBucket
) -> Future[Tensor]:
    """Send float16: 2 bytes per element, 11 significant bits."""
    return _compressed(torch.float16, process_group, bucket)


def bf16_compress_hook(
    process_group: Group, bucket: GradBucket
) -> Future[Tensor]:
    """Send bfloat16: 2 bytes, float32's range with 8 significant bits."""
    return _compressed(torch.bfloat16, process_group, bucket)


def noop_hook(_: Any, bucket: GradBucket) -> Future[Tensor]:
    """Send nothing: a bound for what communication can cost at most."""
    return _done(bucket.buffer())


def _done(value: Tensor) -> Future[Tensor]:
    future: Future[Tensor] = Future(
        devices=[value.device] if value.is_cuda else None
    )
    future.set_result(value)
    return future


def _average(tensor: Tensor, process_group: Group) -> Future[Tensor]:
    """Divide, then add: the sum of undivided float16 could overflow."""
    tensor.mul_(1 / dist.get_world_size(process_group))
    work = dist.all_reduce(tensor, group=process_group, async_op=True)
    future: Future[Tensor] = work.get_future().then(lambda f: f.value()[0])
    return future


def _compressed(
    dtype: torch.dtype, process_group: Group, bucket: GradBucket
) -> Future[Tensor]:
    buffer = bucket.buffer()
    small = _average(buffer.to(dtype), process_group)
    return small.then(lambda future: buffer.copy_(future.value()))


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
        bucket.set_buffer(mean)


class PowerSGDState:
    """What `powerSGD_hook` keeps from step to step, with error feedback.

    Args:
        process_group: the ranks; the default group if None.
        matrix_approximation_rank: the rank r of the approximation.
        start_powerSGD_iter: backward passes with a plain all-reduce first, at
            least 2: the first one is followed by a rebuild of the buckets.
    """

    def __init__(
        self,
        process_group: Group,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 10,  # noqa: N803
    ) -> None:
        if matrix_approximation_rank < 1 or start_powerSGD_iter < 2:
            raise ValueError(
                "matrix_approximation_rank must be at least 1 and "
                "start_powerSGD_iter at least 2, not "
                f"{matrix_approximation_rank} and {start_powerSGD_iter}"
            )
        self.process_group = process_group
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.iteration = 0
        self.errors: dict[int, list[Tensor]] = {}
        self.qs: dict[int, list[Tensor]] = {}


def powerSGD_hook(  # noqa: N802
    state: PowerSGDState, bucket: GradBucket
) -> Future[Tensor]:
    """Send a low-rank approximation P·Qᵀ of every large matrix.

    It waits for its all-reduces, so nothing of it overlaps with backward.
    Source: Vogels et al., PowerSGD, NeurIPS 2019, algorithms 1 and 2.
    """
    if state.iteration < state.start_powerSGD_iter:
        state.iteration += bucket.is_last()
        return allreduce_hook(state.process_group, bucket)

    index = bucket.index()
    matrices, others = _split(state, bucket.gradients())
    if index not in state.qs:
        state.qs[index] = [_random_q(state, matrix) for matrix in matrices]
        state.errors[index] = [torch.zeros_like(matrix) for matrix in matrices]
    for matrix, error in zip(matrices, state.errors[index], strict=True):
        matrix.add_(error)
    wanted = [matrix.clone() for matrix in matrices]
    qs = [_orthonormal(q) for q in state.qs[index]]
    ps = [m @ q for m, q in zip(wanted, qs, strict=True)]
    _average_together(ps + others, state.process_group)
    ps = [_orthonormal(p) for p in ps]
    qs = [m.t() @ p for m, p in zip(wanted, ps, strict=True)]
    _average_together(qs, state.process_group)
    errors = state.errors[index]
    for m, p, q, want, error in zip(
        matrices, ps, qs, wanted, errors, strict=True
    ):
        torch.mm(p, q.t(), out=m)
        torch.sub(want, m, out=error)
    state.qs[index] = qs
    return _done(bucket.buffer())


def _split(
    state: PowerSGDState, gradients: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients worth compressing, as matrices, and the others."""
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for gradient in gradients:
        if gradient.dim() < 2 or not gradient.is_contiguous():
            others.append(gradient)
            continue
        matrix = gradient.flatten(1)
        sent = sum(matrix.shape) * state.matrix_approximation_rank
        if 2 * sent < matrix.numel():
            matrices.append(matrix)
        else:
            others.append(gradient)
    return matrices, others


def _random_q(state: PowerSGDState, matrix: Tensor) -> Tensor:
    """The first Q: random, and equal on all ranks."""
    generator = torch.Generator().manual_seed(0)
    shape = matrix.shape[1], state.matrix_approximation_rank
    return torch.randn(shape, generator=generator).to(matrix)


def _orthonormal(matrix: Tensor) -> Tensor:
    q: Tensor = torch.linalg.qr(matrix.float()).Q
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
