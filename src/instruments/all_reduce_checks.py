"""The ring under test: is its result that of `dist.all_reduce`?"""

from collections.abc import Callable, Sequence
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from miniddp import ring
from miniddp.process import device

LENGTH = 12

Steps = Callable[[int, int], list[tuple[int, int]]]
"""The chunks that a rank sends and receives in each step: from rank and world size."""


def _random(rank: int) -> Tensor:
    return torch.rand(LENGTH, generator=torch.Generator().manual_seed(rank))


DATA: dict[str, Callable[[int], Tensor]] = {
    "ones": lambda rank: torch.ones(LENGTH),
    "the rank's number": lambda rank: torch.full((LENGTH,), float(rank)),
    "random": _random,
}
"""What a test may give each rank."""


def passes(rank: int, all_gather_steps: Steps | None = None) -> list[bool]:
    """Whether the ring passes a test with each of `DATA`, seen from this rank.

    `all_gather_steps` takes the place of the ring's own.
    """
    verdicts = []
    steps = all_gather_steps or ring.all_gather_steps
    with mock.patch.object(ring, "all_gather_steps", steps):
        for make in DATA.values():
            found = make(rank)
            expected = found.clone()
            ring.all_reduce(found)
            dist.all_reduce(expected)
            verdicts.append(torch.allclose(found, expected))
    return verdicts


def largest_difference(rank: int, lengths: Sequence[int]) -> float:
    """The largest difference of any element, for random tensors of these lengths.

    Raises `AssertionError` unless the ring leaves the same bits on all ranks.
    """
    largest = 0.0
    for length in lengths:
        generator = torch.Generator().manual_seed(100 * rank + length)
        found = torch.randn(length, generator=generator).to(device())
        expected = found.clone()
        ring.all_reduce(found)
        dist.all_reduce(expected)
        of_rank_0 = found.clone()
        dist.broadcast(of_rank_0, src=0)
        assert torch.equal(found, of_rank_0), f"other bits than rank 0, length {length}"
        if length:
            largest = max(largest, (found - expected).abs().max().item())
    return largest
