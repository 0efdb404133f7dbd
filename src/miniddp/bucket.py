"""Buckets: which gradients travel together, and the flat buffer they share."""

from collections.abc import Hashable, Sequence

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


def view_like(flat: Tensor, offset: int, parameter: Tensor) -> Tensor:
    """The part of `flat` from element `offset` on, shaped like the parameter.

    It has the parameter's strides too, unless that has gaps in memory.
    """
    expected = 1
    dimensions = zip(parameter.stride(), parameter.shape, strict=True)
    for stride, size in sorted(dimensions):
        if size != 1 and stride != expected:
            return flat[offset:][: parameter.numel()].view(parameter.size())
        expected *= size
    return flat.as_strided(parameter.size(), parameter.stride(), offset)


def same_memory(gradient: Tensor | None, view: Tensor) -> bool:
    """Whether the gradient lies in its bucket."""
    return gradient is not None and gradient.data_ptr() == view.data_ptr()


class Bucket:
    """Gradients of some parameters, one behind the other in a flat `buffer()`.

    The methods are those of `torch.distributed.GradBucket`, so that a
    communication hook for torch's DDP works on it. `indices` are the numbers
    of the parameters; `pending` of their gradients are not in the bucket yet.
    """

    def __init__(
        self, index: int, indices: Sequence[int], parameters: Sequence[Tensor]
    ) -> None:
        self.indices = list(indices)
        self.pending = len(self.indices)
        self._index = index
        self._is_last = False
        self._parameters = list(parameters)
        sizes = [parameter.numel() for parameter in parameters]
        self._flat = parameters[0].new_zeros(sum(sizes))
        self._views = [
            view_like(self._flat, sum(sizes[:i]), parameter)
            for i, parameter in enumerate(parameters)
        ]

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._is_last

    def buffer(self) -> Tensor:
        return self._flat

    def set_buffer(self, buffer: Tensor) -> None:
        self._flat.copy_(buffer)

    def gradients(self) -> list[Tensor]:
        return list(self._views)

    def parameters(self) -> list[Tensor]:
        return list(self._parameters)


def build_buckets(
    parameters: Sequence[Tensor],
    cap_mb: float | None,
    order: Sequence[int] | None = None,
) -> list[Bucket]:
    """Plan and allocate buckets, for gradients that become ready in `order`.

    `cap_mb` is torch's option, in MiB. None: 25, and 1 for the first bucket.
    While the order is not known, the last parameters' bucket goes first.
    """
    cap = int((25 if cap_mb is None else cap_mb) * MIB)
    plan = plan_buckets(
        [parameter.nbytes for parameter in parameters],
        [(parameter.dtype, parameter.device) for parameter in parameters],
        range(len(parameters)) if order is None else order,
        cap,
        first_cap_bytes=MIB if cap_mb is None else cap,
    )
    if order is None:
        plan.sort(key=min, reverse=True)
    buckets = [
        Bucket(index, indices, [parameters[i] for i in indices])
        for index, indices in enumerate(plan)
    ]
    buckets[-1]._is_last = True
    return buckets
