"""Buckets: which gradients travel together, and the flat buffer that they travel in."""

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

    `num_bytes[i]` is the size of parameter i, `kinds[i]` what it must share with its bucket
    (dtype and device). Parameters enter in `order`. A bucket closes as soon as it has *reached*
    its cap, in bytes, so it may be larger. The first bucket of a kind has the cap
    `first_cap_bytes`: it is small so that communication starts early. As torch's DDP does it.
    """
    closed: list[list[int]] = []
    filling: dict[Hashable, list[int]] = {}
    caps: dict[Hashable, int] = {}
    for i in order:
        bucket = filling.setdefault(kinds[i], [])
        bucket.append(i)
        if sum(num_bytes[j] for j in bucket) >= caps.get(kinds[i], first_cap_bytes):
            closed.append(filling.pop(kinds[i]))
            caps[kinds[i]] = cap_bytes
    return closed + list(filling.values())


def view_like(flat: Tensor, offset: int, parameter: Tensor) -> Tensor:
    """The part of `flat` that starts at element `offset`, with the parameter's shape and strides.

    Same strides as the parameter (channels-last weights too) is what autograd and the optimizer
    expect of a gradient.
    """
    if _fills_its_memory(parameter):
        return flat.as_strided(parameter.size(), parameter.stride(), offset)
    return flat[offset : offset + parameter.numel()].view(parameter.size())


def shares_memory(gradient: Tensor | None, view: Tensor) -> bool:
    """Whether a gradient lies where the view into the bucket lies.

    `.grad` is never the view itself: assigning to `.grad.data` would take the view out of its
    bucket.
    """
    return gradient is not None and gradient.data_ptr() == view.data_ptr()


def _fills_its_memory(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


class Bucket:
    """Gradients of some parameters, one behind the other in one flat buffer.

    The methods are those of `torch.distributed.GradBucket`, so a communication hook written for
    torch's DDP can work on it.
    """

    def __init__(self, index: int, indices: Sequence[int], parameters: Sequence[Tensor]) -> None:
        self.indices = list(indices)
        self.pending = len(self.indices)
        self._index = index
        self._is_last = False
        self._parameters = list(parameters)
        first = self._parameters[0]
        numel = sum(p.numel() for p in self._parameters)
        self._flat = torch.zeros(numel, dtype=first.dtype, device=first.device)
        self._views: list[Tensor] = []
        offset = 0
        for parameter in self._parameters:
            self._views.append(view_like(self._flat, offset, parameter))
            offset += parameter.numel()

    def index(self) -> int:
        """The place of the bucket in the order of launching."""
        return self._index

    def buffer(self) -> Tensor:
        """The flat buffer: one dimension, all gradients of the bucket."""
        return self._flat

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the contents of the flat buffer."""
        self._flat.copy_(buffer)

    def gradients(self) -> list[Tensor]:
        """One view into the flat buffer for each parameter, with the parameter's shape."""
        return list(self._views)

    def parameters(self) -> list[Tensor]:
        """The parameters whose gradients travel here."""
        return list(self._parameters)

    def is_last(self) -> bool:
        """Whether this is the last bucket of the backward pass."""
        return self._is_last


def build_buckets(plan: Sequence[Sequence[int]], parameters: Sequence[Tensor]) -> list[Bucket]:
    """Allocate the buckets of a plan."""
    buckets = [
        Bucket(index, indices, [parameters[i] for i in indices])
        for index, indices in enumerate(plan)
    ]
    if buckets:
        buckets[-1]._is_last = True
    return buckets
