"""Shares: do two ranks read samples that only one of them should?"""

from collections.abc import Iterator
from itertools import pairwise

from miniddp.check.epochs import BATCHES, Epoch, Samples, samples_of
from miniddp.check.finding import Event, Finding, Peers, Run

SHARED = 8
"""So many samples both have to read: a few may be drawn twice by chance."""


def overlap(run: Run, training: list[Epoch]) -> Iterator[Finding]:
    """Samples that ranks 0 and 1 read, each in an order of its own."""
    for epoch in training:
        mine, others, *_ = map(samples_of, epoch.batches)
        count = share_content(mine, others)
        read_everything = all(map(reads_everything, epoch.peers))
        is_sure = read_everything and not is_endless(mine)
        if is_sure:
            count = max(count, share_samples(mine, others))
        if count:
            yield run.found(
                "overlapping shares",
                epoch.peers[0],
                sure="certain" if is_sure else "likely",
                count=count,
                watched=len(mine),
            )


def reads_everything(epoch: Event) -> bool:
    if epoch["replacement"] or None in (epoch["samples"], epoch["batches"]):
        return False
    size = epoch["batch_size"] or 1
    return bool((epoch["batches"] + 1) * size > epoch["samples"])


def is_endless(samples: Samples) -> bool:
    """Whether a rank has read an index again: its length tells nothing."""
    indices = [index for index, *_ in samples if index >= 0]
    return len(set(indices)) < len(indices)


def share_samples(mine: Samples, others: Samples) -> int:
    """How many both have read, if a column is equal, and no constant."""
    one = {index: columns for index, *columns in mine}
    other = {index: columns for index, *columns in others}
    both = one.keys() & other.keys()
    pairs = [zip(one[index], other[index], strict=False) for index in both]
    for column in zip(*pairs, strict=False):
        is_equal = all(value == peer for value, peer in column)
        are_enough = len(both) >= SHARED and len(set(column)) >= BATCHES
        if is_equal and are_enough and not is_regular(list(both), column):
            return len(both)
    return 0


def is_regular(indices: list[int], values: Peers) -> bool:
    """Whether the values follow from the indices, as labels may."""
    for period in range(1, len(indices) // 2 + 1):
        rests = [index % period for index in indices]
        if len(set(zip(rests, values, strict=True))) == len(set(rests)):
            return True
    in_order = [value for _, value in sorted(zip(indices, values, strict=True))]
    changes = sum(one != other for one, other in pairwise(in_order))
    return changes < len(set(in_order))


def share_content(mine: Samples, others: Samples) -> int:
    """How many both have read, if they are many, and none was read twice."""
    kinds = {tuple(columns) for _, *columns in mine}
    both = kinds & {tuple(columns) for _, *columns in others}
    are_many = len(both) >= max(SHARED, len(kinds) / 5)
    are_unique = len(kinds) == len(mine)
    return len(both) if are_many and are_unique and () not in both else 0
