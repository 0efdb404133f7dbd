"""Some elements of tensors, and digests of them by which ranks are compared.

Taken in the script's thread, digested in that of the exchange.
"""

import sys
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

ELEMENTS = 256
"""At most so many elements of a tensor are compared, evenly spread."""
ELEMENTS_OF_A_ROW = 64
WEIGHTS = 7
COLUMNS = 4
"""Of so many tensors of a batch the samples are compared."""


class Sample:
    """Of each tensor some elements as they are now: a digest and a sum.

    In the sum elements have unequal weights, so that few gradients add up to
    nothing. They depend on the place within the tensor alone.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.names = list(tensors)
        with torch.no_grad():
            pieces = [spread_out(tensor) for tensor in tensors.values()]
            self.lengths = [len(piece) for piece in pieces]
            self.values = torch.cat(pieces) if pieces else torch.empty(0)

    def resolve(self) -> dict[str, list[float | None]]:
        """The sum is None if it is not finite."""
        if not self.names:
            return {}
        values = self.values.cpu()
        data = to_bytes(values)
        lengths = torch.tensor(self.lengths, dtype=torch.int64)
        begins = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
        weights = (torch.arange(len(values)) - begins) % WEIGHTS + 1
        weighted = values.double() * weights
        sums = torch.segment_reduce(weighted, "sum", lengths=lengths)
        begin = 0
        resolved = {}
        for name, length, total in zip(
            self.names, self.lengths, sums.tolist(), strict=True
        ):
            end = begin + length * values.element_size()
            is_finite = abs(total) < float("inf")
            digest = zlib.crc32(data[begin:end])
            resolved[name] = [digest, total if is_finite else None]
            begin = end
        return resolved


class Rows:
    """Of each sample of a batch some elements: a digest."""

    def __init__(self, batch: Tensor) -> None:
        flat = batch.detach().reshape(len(batch), -1)
        stride = max(1, flat.shape[1] // ELEMENTS_OF_A_ROW)
        self.values = flat[:, ::stride].clone()

    def resolve(self) -> list[int]:
        data = to_bytes(self.values.cpu())
        size = max(1, len(data) // max(1, len(self.values)))
        begins = range(0, len(data), size)
        return [zlib.crc32(data[begin : begin + size]) for begin in begins]


def columns_of(batch: Any) -> list[Any]:
    """Digests of each sample: of its names, or of its row in each tensor."""
    if are_named(batch):
        return [list(map(digest_of_names, batch))]
    columns = [
        leaf
        for leaf in leaves_of(batch)
        if isinstance(leaf, Tensor)
        and leaf.dim()
        and leaf.layout == torch.strided
    ]
    return [Rows(column) for column in columns[:COLUMNS]]


def leaves_of(values: Any) -> list[Any]:
    """Also of what a batch holds that is of a class of its own."""
    leaves = pytree.tree_leaves(values)
    return pytree.tree_leaves([held_by(leaf) for leaf in leaves])


def held_by(leaf: Any) -> Any:
    if isinstance(leaf, Tensor | torch.nn.Module):
        return leaf
    is_mapping = isinstance(leaf, Mapping)
    return dict(leaf) if is_mapping else getattr(leaf, "__dict__", leaf)


def are_named(batch: Any) -> bool:
    """Whether its samples are told apart by their names, not by tensors."""
    return isinstance(batch, list) and all(isinstance(s, dict) for s in batch)


def digest_of_names(sample: dict[str, Any]) -> int:
    """Of its strings and numbers, as of a file or an image."""
    names = [v for v in sample.values() if isinstance(v, str | int)]
    return zlib.crc32(repr(names).encode())


def largest_of(values: Any) -> int:
    """The number of elements of the largest tensor in nested `values`."""
    leaves = leaves_of(values)
    sizes = [leaf.numel() for leaf in leaves if isinstance(leaf, Tensor)]
    return max(sizes, default=0)


def spread_out(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.reshape(-1)
    return flat[:: len(flat) // ELEMENTS | 1]


def to_bytes(values: Tensor) -> memoryview:
    flat = values.contiguous().reshape(-1)
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


def is_of_split_layer(parameter: Tensor) -> bool:
    """Whether it is a part of a layer that FSDP does not put together."""
    states = sys.modules.get("torch.distributed._composable_state")
    is_sharded = bool(getattr(states, "_module_state_mapping", None))
    mesh: Any = getattr(parameter, "device_mesh", None)
    return mesh is not None and (mesh.ndim > 1 or not is_sharded)


def is_whole(parameter: Tensor) -> bool:
    """Not a part, as FSDP holds it, and not of a lazy module."""
    parts = ("placements", "_is_flat_param", "_fsdp_flattened")
    is_part = any(hasattr(parameter, name) for name in parts)
    is_lazy = torch.nn.parameter.is_lazy(parameter)
    return not is_part and not is_lazy and parameter.layout == torch.strided
