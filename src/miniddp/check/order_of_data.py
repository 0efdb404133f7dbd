"""In which order a dataset lists its samples, as far as its attributes tell."""

import zlib
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils.data import Subset

FEWEST = 3
MOST = 100_000
"""Lists of so many things are compared."""
LETTERS = 200
PARTS = 16
"""Of a thing so many letters, or so many of what it holds."""


def order_of(dataset: Any) -> dict[str, list[int]]:
    """Of each list and dictionary two digests: with and without its order.

    Where ranks hold the same things in another order, a sampler that splits
    indices does not split samples.
    """
    if isinstance(dataset, Subset):
        indices = digests(map(int, dataset.indices[:MOST]))
        of_subset = {"indices": [sum_of(indices, ordered=True), 0]}
        return order_of(dataset.dataset) | of_subset
    if isinstance(dataset, list):
        return digests_of_list("the list", dataset)
    found: dict[str, list[int]] = {}
    for name, value in getattr(dataset, "__dict__", {}).items():
        if isinstance(value, list | tuple):
            found.update(digests_of_list(name, value))
        if isinstance(value, dict) and FEWEST <= len(value) <= MOST:
            keys = sum_of(digests(value), ordered=False)
            values = sum_of(digests(value.values()), ordered=False)
            pairs = sum_of(digests(value.items()), ordered=False)
            found[name] = [pairs, keys + values]
    return found


def digests_of_list(name: str, items: Any) -> dict[str, list[int]]:
    if not FEWEST <= len(items) <= MOST:
        return {}
    codes = digests(items)
    return {name: [sum_of(codes, ordered=True), sum_of(codes, ordered=False)]}


def digests(items: Iterable[Any]) -> list[int]:
    return [zlib.crc32(repr(plain(item)).encode()) for item in items]


def plain(item: Any) -> Any:
    """What is the same on all ranks if the item is: no address."""
    if isinstance(item, tuple | list):
        return [plain(part) for part in item[:PARTS]]
    if isinstance(item, str | bytes):
        return item[:LETTERS]
    if isinstance(item, Tensor):
        return item.shape
    return item if isinstance(item, int | float) else type(item).__name__


def sum_of(codes: list[int], *, ordered: bool) -> int:
    if not ordered:
        return sum(codes) % 2**32
    return sum(place * code for place, code in enumerate(codes, 1)) % 2**32
