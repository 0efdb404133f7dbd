"""What communication costs before anyone measures it: bytes and seconds.

Pure functions of three numbers: the bytes S of a tensor, the number of ranks N, and
the `Link` between two ranks. A message of S bytes takes alpha + S beta seconds
(Hockney, "The communication challenge for MPP", 1994). Nodes of GPUs, and tables that
others measured, are in `instruments.network`.

Every function raises `ValueError` for a negative amount or for fewer ranks than one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations


@dataclass(frozen=True)
class Link:
    """From one rank to the next: `alpha` seconds per message, `beta` per byte."""

    alpha: float
    beta: float

    def __post_init__(self) -> None:
        check_amounts(alpha=self.alpha, beta=self.beta)

    def seconds(self, num_bytes: float) -> float:
        """Seconds for one message."""
        check_amounts(num_bytes=num_bytes)
        return self.alpha + num_bytes * self.beta


def check_amounts(**amounts: float) -> None:
    """Raise `ValueError` naming the first amount that is negative or not finite."""
    for name, amount in amounts.items():
        if not (math.isfinite(amount) and amount >= 0):
            raise ValueError(
                f"{name} must be a finite number of at least 0, not {amount!r}"
            )


def check_counts(**counts: int) -> None:
    """Raise `ValueError` naming the first count that is no integer of at least 1."""
    for name, count in counts.items():
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"{name} must be an integer of at least 1, not {count!r}")


# What a step moves through a GPU's memory

ADAMW_BYTES = 28
"""For each element, in one pass over float32 tensors: parameter, gradient and both
moments are read, parameter and moments written. The same for parameters and gradients
of two bytes with a float32 copy of the parameters: 14 are read, 14 written."""


def adamw_seconds(elements: float, bytes_per_second: float) -> float:
    """A step of AdamW at the memory's bandwidth, as `fused=True` comes close to it."""
    check_amounts(elements=elements)
    return ADAMW_BYTES * elements * seconds_per_byte(bytes_per_second)


def copy_seconds_per_byte(bytes_per_second: float) -> float:
    """To copy one byte: it is read and written."""
    return 2 * seconds_per_byte(bytes_per_second)


def seconds_per_byte(bytes_per_second: float) -> float:
    check_amounts(bytes_per_second=bytes_per_second)
    if bytes_per_second == 0:
        raise ValueError("bytes_per_second must be more than 0")
    return 1 / bytes_per_second


# Bytes that one rank sends. `num_bytes` is S, the whole tensor.


def ring_reduce_scatter_bytes(num_bytes: float, world_size: int) -> float:
    """(N - 1) / N S bytes: all chunks but one.

    Where N does not divide, the mean over the ranks.
    """
    check_amounts(num_bytes=num_bytes)
    check_counts(world_size=world_size)
    return num_bytes * (world_size - 1) / world_size


def ring_all_gather_bytes(num_bytes: float, world_size: int) -> float:
    """The same as `ring_reduce_scatter_bytes`; S is the gathered tensor."""
    return ring_reduce_scatter_bytes(num_bytes, world_size)


def ring_all_reduce_bytes(num_bytes: float, world_size: int) -> float:
    """2 (N - 1) / N S bytes, which is optimal (Patarasuk and Yuan, JPDC 2009)."""
    return 2 * ring_reduce_scatter_bytes(num_bytes, world_size)


def root_all_reduce_bytes(num_bytes: float, world_size: int, rank: int) -> float:
    """Rank 0 sends its result N - 1 times, every other rank its tensor once."""
    check_amounts(num_bytes=num_bytes)
    _check_rank(rank, world_size)
    return num_bytes * (world_size - 1 if rank == 0 else 1)


def tree_all_reduce_bytes(num_bytes: float, world_size: int, rank: int) -> float:
    """Once to the parent, then once to each child.

    The tree is binomial, with rank 0 at its root. The children of rank r are r + 1,
    r + 2, r + 4, … below r's own lowest bit, which leads to its parent (Thakur,
    Rabenseifner and Gropp, IJHPCA 2005).
    """
    check_amounts(num_bytes=num_bytes)
    _check_rank(rank, world_size)
    lowest_bit = rank & -rank if rank else world_size
    powers = [1 << bit for bit in range(world_size.bit_length())]
    children = [
        power for power in powers if power < lowest_bit and rank + power < world_size
    ]
    parents = 0 if rank == 0 else 1
    return num_bytes * (parents + len(children))


def _check_rank(rank: int, world_size: int) -> None:
    check_counts(world_size=world_size)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be from 0 to {world_size - 1}, not {rank!r}")


# Seconds until the last rank has the result


def ring_reduce_scatter_seconds(num_bytes: float, world_size: int, link: Link) -> float:
    """(N - 1) alpha + (N - 1) / N S beta: N - 1 steps, each sends one chunk."""
    sent = ring_reduce_scatter_bytes(num_bytes, world_size)
    return (world_size - 1) * link.alpha + sent * link.beta


def ring_all_gather_seconds(num_bytes: float, world_size: int, link: Link) -> float:
    """The same as `ring_reduce_scatter_seconds`; S is the gathered tensor."""
    return ring_reduce_scatter_seconds(num_bytes, world_size, link)


def ring_all_reduce_seconds(num_bytes: float, world_size: int, link: Link) -> float:
    """2 (N - 1) alpha + 2 (N - 1) / N S beta (Patarasuk and Yuan, JPDC 2009)."""
    return 2 * ring_reduce_scatter_seconds(num_bytes, world_size, link)


def root_all_reduce_seconds(num_bytes: float, world_size: int, link: Link) -> float:
    """2 (N - 1) (alpha + S beta): N - 1 tensors come to rank 0, then N - 1 go out."""
    check_counts(world_size=world_size)
    return 2 * (world_size - 1) * link.seconds(num_bytes)


def tree_all_reduce_seconds(num_bytes: float, world_size: int, link: Link) -> float:
    """2 ⌈log2 N⌉ (alpha + S beta): the whole tensor up a binomial tree and down again.

    Thakur, Rabenseifner and Gropp, IJHPCA 2005. NCCL cuts the tensor into pieces that
    follow each other through two trees, so that its beta term does not grow with N.
    """
    check_counts(world_size=world_size)
    return 2 * (world_size - 1).bit_length() * link.seconds(num_bytes)


# From measured seconds to bandwidth and link


def algorithm_bandwidth(num_bytes: float, seconds: float) -> float:
    """S / t in bytes per second (nccl-tests, doc/PERFORMANCE.md)."""
    check_amounts(num_bytes=num_bytes, seconds=seconds)
    if seconds == 0:
        raise ValueError("seconds must be more than 0 to give a bandwidth")
    return num_bytes / seconds


def bus_bandwidth(
    num_bytes: float, seconds: float, world_size: int, collective: str = "all_reduce"
) -> float:
    """Algorithm bandwidth times the part of S that a link must carry, bytes per second.

    The factor is 2 (N - 1) / N for all_reduce, (N - 1) / N for reduce_scatter and
    all_gather, 1 for broadcast and reduce, so that the result can be compared with the
    hardware's bandwidth, whatever N is (nccl-tests, doc/PERFORMANCE.md).
    """
    check_counts(world_size=world_size)
    part = (world_size - 1) / world_size
    factors = {
        "all_reduce": 2 * part,
        "reduce_scatter": part,
        "all_gather": part,
        "broadcast": 1.0,
        "reduce": 1.0,
    }
    if collective not in factors:
        raise ValueError(
            f"collective must be one of {', '.join(factors)}, not {collective!r}"
        )
    return algorithm_bandwidth(num_bytes, seconds) * factors[collective]


def fit_link(num_bytes: Sequence[float], seconds: Sequence[float]) -> Link:
    """The link whose messages come closest to measured ones.

    Closest is the least sum of relative errors. Relative, so that a small message,
    which shows alpha, counts as much as a large one, which shows beta. Not squared, so
    that a few times that something disturbed change nothing: the best line goes through
    two of the points, or through one with an alpha or a beta of 0, and the others pull
    at it only by which side they are on. Neither alpha nor beta becomes negative.
    Raises `ValueError` for fewer than two different sizes.
    """
    if len(num_bytes) != len(seconds) or len(set(num_bytes)) < 2:
        raise ValueError(
            "fit_link needs one time per size and two different sizes at least, not "
            f"{len(num_bytes)} sizes ({len(set(num_bytes))} different) and "
            f"{len(seconds)} times"
        )
    check_amounts(smallest_size=min(num_bytes))
    if not min(seconds) > 0:
        raise ValueError(
            f"every time must be more than 0 seconds, not {min(seconds)!r}"
        )
    points = list(zip(num_bytes, seconds, strict=True))
    lines = [Link(time, 0.0) for _, time in points]
    lines += [Link(0.0, time / size) for size, time in points if size]
    for (left, early), (right, late) in combinations(sorted(points), 2):
        if left == right or late < early:
            continue
        beta = (late - early) / (right - left)
        alpha = early - left * beta
        if alpha >= 0:
            lines.append(Link(alpha, beta))

    def relative_errors(line: Link) -> float:
        return sum(abs(line.seconds(size) - time) / time for size, time in points)

    return min(lines, key=relative_errors)


def fit_ring_all_reduce(
    num_bytes: Sequence[float], seconds: Sequence[float], world_size: int
) -> Link:
    """The link of `ring_all_reduce_seconds` that comes closest to measured times."""
    check_counts(world_size=world_size)
    if world_size == 1:
        raise ValueError(
            "an all-reduce of one rank uses no link: measure two ranks at least"
        )
    whole = fit_link(num_bytes, seconds)
    steps = 2 * (world_size - 1)
    return Link(whole.alpha / steps, whole.beta * world_size / steps)
