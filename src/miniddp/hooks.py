"""Communication hooks: ways to average a bucket, as `hook(state, bucket)` returning a future.

Names and calling convention are those of `torch.distributed.algorithms.ddp_comm_hooks`. A hook
receives this rank's gradients, not yet divided, and its future holds the mean over the ranks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future

Hook = Callable[[Any, Any], Future[Tensor]]


def allreduce_hook(process_group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
    """The mean by all-reduce. Divides first, so that the sum cannot overflow fp16."""
    return _average(bucket.buffer(), process_group)


def fp16_compress_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> Future[Tensor]:
    """Send 2 bytes per element as float16: half of fp32's bytes, 11 significant bits."""
    return _compressed(torch.float16, process_group, bucket)


def bf16_compress_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> Future[Tensor]:
    """Send 2 bytes per element as bfloat16: fp32's range with 8 significant bits."""
    return _compressed(torch.bfloat16, process_group, bucket)


def noop_hook(_: Any, bucket: GradBucket) -> Future[Tensor]:
    """Send nothing: every rank keeps its own gradient. For measuring what communication costs."""
    return _done(bucket.buffer())


def _done(value: Tensor) -> Future[Tensor]:
    future: Future[Tensor] = Future(devices=[value.device] if value.is_cuda else None)
    future.set_result(value)
    return future


def _average(tensor: Tensor, process_group: dist.ProcessGroup | None) -> Future[Tensor]:
    tensor.div_(dist.get_world_size(process_group))
    work = dist.all_reduce(tensor, group=process_group, async_op=True)
    future: Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future


def _compressed(
    dtype: torch.dtype, process_group: dist.ProcessGroup | None, bucket: Any
) -> Future[Tensor]:
    buffer = bucket.buffer()
    small = _average(buffer.to(dtype), process_group)
    return small.then(lambda done: buffer.copy_(done.value()))


def check_future(result: Any) -> Any:
    """What a hook returned; `RuntimeError` if nobody can wait for it."""
    if not isinstance(result, (torch._C.Future, dist.Work)):
        raise RuntimeError(
            "a communication hook must return a torch.futures.Future of the averaged buffer, "
            f"not {type(result).__name__}"
        )
    return result


def wait_for(work: Any, bucket: Any) -> None:
    """Wait until the bucket is averaged. A hook's future holds the result, or a list of it."""
    result = work.wait()
    if isinstance(work, dist.Work):
        return
    averaged = result[0] if isinstance(result, (list, tuple)) else result
    if not isinstance(averaged, Tensor) or averaged.numel() != bucket.buffer().numel():
        raise RuntimeError(
            "the future of a communication hook must hold a tensor of the bucket's "
            f"{bucket.buffer().numel()} elements, not {_describe(averaged)}"
        )
    if averaged.data_ptr() != bucket.buffer().data_ptr():
        bucket.set_buffer(averaged)


def _describe(value: Any) -> str:
    return f"{value.numel()} elements" if isinstance(value, Tensor) else type(value).__name__


class PowerSGDState:
    """What `powerSGD_hook` keeps from step to step.

    Args:
        process_group: the ranks; the default group if None.
        matrix_approximation_rank: the rank r of the approximation.
        start_powerSGD_iter: backward passes with a plain all-reduce before the first compression.
        use_error_feedback: add what compression lost to the next step's gradient.
        warm_start: begin with the last step's Q.
        min_compression_rate: compress a matrix only if r·(rows + columns) elements are fewer
            than rows·columns by this factor.
        random_seed: the seed of the first Q, the same on all ranks.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 10,  # noqa: N803
        use_error_feedback: bool = True,
        warm_start: bool = True,
        min_compression_rate: float = 2,
        random_seed: int = 0,
    ) -> None:
        if matrix_approximation_rank < 1:
            raise ValueError(
                f"matrix_approximation_rank must be at least 1, not {matrix_approximation_rank}"
            )
        if start_powerSGD_iter < 2 and (use_error_feedback or warm_start):
            raise ValueError(
                "start_powerSGD_iter must be at least 2 with error feedback or warm start: "
                "the buckets are rebuilt after the first backward pass"
            )
        self.process_group = process_group
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.min_compression_rate = min_compression_rate
        self.random_seed = random_seed
        self.iteration = 0
        self.errors: dict[int, list[Tensor]] = {}
        self.qs: dict[int, list[Tensor]] = {}


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Future[Tensor]:  # noqa: N802
    """Send a low-rank approximation P·Qᵀ of every large matrix, and the rest as it is.

    The second all-reduce needs the result of the first, so the hook waits for both: the order of
    collectives stays the same on all ranks, and nothing of it overlaps with backward.

    Source: Vogels et al., PowerSGD, NeurIPS 2019, algorithms 1 and 2.
    """
    if state.iteration < state.start_powerSGD_iter:
        state.iteration += bucket.is_last()
        return allreduce_hook(state.process_group, bucket)

    index, buffer = bucket.index(), bucket.buffer()
    matrices, others = _split(state, bucket.gradients())
    for matrix, error in zip(matrices, state.errors.get(index, []), strict=False):
        matrix.add_(error)
    wanted = [matrix.clone() for matrix in matrices]
    qs = _start_qs(state, index, matrices)
    ps = [matrix @ q for matrix, q in zip(matrices, qs, strict=True)]
    _average_together(ps + others, state.process_group)
    ps = [torch.linalg.qr(p.float()).Q.to(p.dtype) for p in ps]
    qs = [matrix.t() @ p for matrix, p in zip(matrices, ps, strict=True)]
    _average_together(qs, state.process_group)
    for matrix, p, q in zip(matrices, ps, qs, strict=True):
        torch.mm(p, q.t(), out=matrix)
    state.qs[index] = qs
    if state.use_error_feedback:
        state.errors[index] = [w.sub_(m) for w, m in zip(wanted, matrices, strict=True)]
    return _done(buffer)


def _split(state: PowerSGDState, gradients: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients that are worth compressing, as matrices, and the others."""
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for gradient in gradients:
        if gradient.dim() < 2 or not gradient.is_contiguous():
            others.append(gradient)
            continue
        matrix = gradient.view(gradient.shape[0], -1)
        rows, columns = matrix.shape
        rank = min(rows, columns, state.matrix_approximation_rank)
        worth_it = (rows + columns) * rank * state.min_compression_rate < rows * columns
        (matrices if worth_it else others).append(matrix if worth_it else gradient)
    return matrices, others


def _start_qs(state: PowerSGDState, index: int, matrices: Sequence[Tensor]) -> list[Tensor]:
    """Last step's Qs, or random ones that are equal on all ranks, with orthonormal columns."""
    qs = state.qs.get(index) if state.warm_start else None
    if qs is None:
        generator = torch.Generator().manual_seed(state.random_seed)
        qs = [
            torch.randn(
                m.shape[1], min(*m.shape, state.matrix_approximation_rank), generator=generator
            ).to(m)
            for m in matrices
        ]
    return [torch.linalg.qr(q.float()).Q.to(q.dtype) for q in qs]


def _average_together(tensors: Sequence[Tensor], process_group: dist.ProcessGroup | None) -> None:
    """Average tensors in place, in one all-reduce."""
    if not tensors:
        return
    averaged = _average(torch.cat([t.reshape(-1) for t in tensors]), process_group).wait()
    parts = torch.split(averaged, [t.numel() for t in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))
