"""Buckets: which gradients travel together, and the flat buffer they share."""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

MIB = 1024 * 1024


def plan_buckets(
    num_bytes: Sequence[int],
    kinds: Sequence[Hashable],
    order: Sequence[int],
    cap_bytes: int,
    first_cap_bytes: int,
) -> list[list[int]]:
    """Split parameters into buckets: a list of lists of parameter indices.

    Parameter i has `num_bytes[i]` bytes and shares a bucket with parameters of
    the same `kinds[i]` (dtype and device) only. They enter in `order`. A bucket
    closes when it has *reached* its cap, in bytes, so it may be larger. The
    first bucket of a kind has a cap of its own: a small one is sent early.
    """
    closed: list[list[int]] = []
    filling: dict[Hashable, list[int]] = {}
    caps: dict[Hashable, int] = {}
    for i in order:
        bucket = filling.setdefault(kinds[i], [])
        bucket.append(i)
        size = sum(num_bytes[j] for j in bucket)
        if size >= caps.get(kinds[i], first_cap_bytes):
            closed.append(filling.pop(kinds[i]))
            caps[kinds[i]] = cap_bytes
    return closed + list(filling.values())


class Bucket:
    """Bucket `index` of a plan: gradients in a row, in a flat `buffer()`.

    The methods are those of `torch.distributed.GradBucket`, so that a
    communication hook for torch's DDP works on it. `indices` are the numbers
    of the parameters; `pending` of their gradients are not in the bucket yet.
    """

    def __init__(
        self, index: int, plan: list[list[int]], parameters: Sequence[Tensor]
    ) -> None:
        self.indices = plan[index]
        self.pending = len(self.indices)
        self._index, self._is_last = index, index == len(plan) - 1
        self._parameters = [parameters[i] for i in self.indices]
        sizes = [parameter.numel() for parameter in self._parameters]
        self._flat = self._parameters[0].new_zeros(sum(sizes))
        parts = torch.split(self._flat, sizes)
        self._views = list(map(view_like, parts, self._parameters))

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._is_last

    def buffer(self) -> Tensor:
        return self._flat

    def set_buffer(self, buffer: Tensor) -> None:
        self._flat.copy_(buffer)

    def gradients(self) -> list[Tensor]:
        return self._views

    def parameters(self) -> list[Tensor]:
        return self._parameters


def view_like(part: Tensor, parameter: Tensor) -> Tensor:
    """A part of a flat tensor, with the shape and the order of a parameter."""
    strides = torch.empty_like(parameter, device="meta").stride()
    return part.as_strided(parameter.size(), strides)


def same_memory(gradient: Tensor | None, view: Tensor) -> bool:
    """Whether the gradient lies in its bucket."""
    return gradient is not None and gradient.data_ptr() == view.data_ptr()


def build_buckets(
    parameters: Sequence[Tensor],
    cap_mb: float | None,
    order: Sequence[int] = (),
) -> list[Bucket]:
    """Plan and allocate buckets, for gradients that become ready in `order`.

    `cap_mb` is torch's option, in MiB. None: 25, and 1 for the first bucket.
    While the order is not known, the last parameters' bucket goes first.
    """
    first_cap_mb, cap_mb = (1, 25) if cap_mb is None else (cap_mb, cap_mb)
    plan = plan_buckets(
        [parameter.nbytes for parameter in parameters],
        [(parameter.dtype, parameter.device) for parameter in parameters],
        order or range(len(parameters)),
        int(cap_mb * MIB),
        int(first_cap_mb * MIB),
    )
    if not order:
        plan.sort(key=min, reverse=True)
    return [Bucket(index, plan, parameters) for index in range(len(plan))]
