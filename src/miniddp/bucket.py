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

    Parameter i has `num_bytes[i]` bytes and shares a bucket only with those of
    its `kinds[i]` (dtype and device). They enter in `order`. A bucket closes
    when it has *reached* its cap, in bytes. The first of a kind has its own.
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
    """Gradients of some parameters, by their `indices`, in one flat buffer.

    `pending` of them are not in it yet. The methods are torch's `GradBucket`'s.
    """

    def __init__(
        self, index: int, plan: list[list[int]], parameters: Sequence[Tensor]
    ) -> None:
        self.indices, self.pending = plan[index], len(plan[index])
        self._index, self._is_last = index, index == len(plan) - 1
        self._parameters = [parameters[i] for i in self.indices]
        dense = [torch.empty_like(p, device="meta") for p in self._parameters]
        sizes = [like.numel() for like in dense]
        self._flat = self._parameters[0].new_zeros(sum(sizes))
        parts = zip(torch.split(self._flat, sizes), dense, strict=True)
        self._views = [x.as_strided(p.size(), p.stride()) for x, p in parts]

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


def same_memory(gradient: Tensor | None, view: Tensor) -> bool:
    """Whether the gradient lies in its bucket."""
    return gradient is not None and gradient.data_ptr() == view.data_ptr()


def build_buckets(
    parameters: Sequence[Tensor], cap_mb: float | None, order: Sequence[int]
) -> list[Bucket]:
    """Plan and allocate buckets, for gradients that become ready in `order`.

    `cap_mb` is torch's option, in MiB. None: 25, and 1 for the first bucket.
    While the order is not known, the last parameters' bucket goes first.
    """
    caps = (25, 1) if cap_mb is None else (cap_mb, cap_mb)
    plan = plan_buckets(
        [parameter.nbytes for parameter in parameters],
        [(parameter.dtype, parameter.device) for parameter in parameters],
        order or range(len(parameters)),
        *(int(cap * MIB) for cap in caps),
    )
    if not order:
        plan.sort(key=min, reverse=True)
    return [Bucket(index, plan, parameters) for index in range(len(plan))]
