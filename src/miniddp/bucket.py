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
    sizes: dict[Hashable, int] = {}
    caps: dict[Hashable, int] = {}
    for i in order:
        kind = kinds[i]
        filling.setdefault(kind, []).append(i)
        sizes[kind] = sizes.get(kind, 0) + num_bytes[i]
        if sizes[kind] >= caps.get(kind, first_cap_bytes):
            closed.append(filling.pop(kind))
            sizes[kind] = 0
            caps[kind] = cap_bytes
    return closed + list(filling.values())


class Bucket:
    """Gradients of some parameters, by their `indices`, in one flat buffer.

    Those of `pending` are not ready yet. `addresses`: where each gradient lies.
    The methods are those of torch's `GradBucket`.
    """

    def __init__(
        self,
        index: int,
        plan: list[list[int]],
        parameters: Sequence[Tensor],
        strides: Sequence[tuple[int, ...]],
    ) -> None:
        self.indices = plan[index]
        self.pending = set(self.indices)
        self._index = index
        self._is_last = index == len(plan) - 1
        self._parameters = [parameters[i] for i in self.indices]
        sizes = [parameter.numel() for parameter in self._parameters]
        self._flat = self._parameters[0].new_zeros(sum(sizes))
        pieces = torch.split(self._flat, sizes)
        self._views = [
            piece.as_strided(parameters[i].shape, strides[i])
            for i, piece in zip(self.indices, pieces, strict=True)
        ]
        self._aliases = [view.detach() for view in self._views]
        self.addresses = [view.data_ptr() for view in self._views]

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._is_last

    def buffer(self) -> Tensor:
        return self._flat

    def set_buffer(self, buffer: Tensor) -> None:
        """Let the gradients lie in this one, which may be of another dtype."""
        sizes = [view.numel() for view in self._views]
        pieces = torch.split(buffer, sizes)
        self._flat = buffer
        self._views = [
            piece.as_strided(view.shape, view.stride())
            for piece, view in zip(pieces, self._views, strict=True)
        ]

    def gradients(self) -> list[Tensor]:
        return self._views

    def parameters(self) -> list[Tensor]:
        return self._parameters

    def aliases(self) -> list[Tensor]:
        """What `.grad` becomes where it shall be a view, the same each time."""
        return self._aliases

    def renew_aliases(self) -> None:
        """For a user may have let one point elsewhere, by `.grad.data = …`."""
        if [alias.data_ptr() for alias in self._aliases] != self.addresses:
            self._aliases = [view.detach() for view in self._views]


def same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether both begin at the same address."""
    return one.data_ptr() == other.data_ptr()


def dense_stride(parameter: Tensor) -> tuple[int, ...]:
    """The strides of its gradient: the same order in memory, without gaps."""
    if parameter.is_contiguous():
        return parameter.stride()
    return torch.empty_like(parameter, device="meta").stride()


def build_buckets(
    parameters: Sequence[Tensor],
    strides: Sequence[tuple[int, ...]],
    cap_mb: float | None,
    order: Sequence[int],
) -> list[Bucket]:
    """Plan and allocate buckets, for gradients that become ready in `order`.

    Gradients lie there with these `strides`, which are the same on all ranks.
    `cap_mb` is torch's option, in MiB. None: 25, and 1 for the first bucket.
    While the order is not known, the last parameters' bucket goes first.
    """
    plan = plan_buckets(
        num_bytes=[parameter.nbytes for parameter in parameters],
        kinds=[(parameter.dtype, parameter.device) for parameter in parameters],
        order=order or range(len(parameters)),
        cap_bytes=int(MIB * (25 if cap_mb is None else cap_mb)),
        first_cap_bytes=int(MIB * (1 if cap_mb is None else cap_mb)),
    )
    if not order:
        plan.sort(key=min, reverse=True)
    return [
        Bucket(index, plan, parameters, strides) for index in range(len(plan))
    ]
