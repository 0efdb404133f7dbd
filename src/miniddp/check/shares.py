"""Shares: do two ranks read samples that only one of them should?"""

from collections.abc import Iterator
from itertools import pairwise

from miniddp.check.epochs import BATCHES, Epoch, samples_of
from miniddp.check.finding import Event, Finding, Peers, Run

UNIQUE = 0.9
"""Such a share of the samples has to be unlike the others, to be known."""
SHARED = 3
"""So many samples that both read have to be equal."""


def overlap(run: Run, training: list[Epoch]) -> Iterator[Finding]:
    """Samples that ranks 0 and 1 read, each in an order of its own."""
    for epoch in training:
        mine, others, *_ = map(samples_of, epoch.batches)
        count = max(share_samples(mine, others), share_content(mine, others))
        if count and all(reads_everything(event) for event in epoch.peers):
            yield run.found(
                "overlapping shares",
                epoch.peers[0],
                count=count,
                watched=len(mine),
            )


def reads_everything(epoch: Event) -> bool:
    if epoch["replacement"] or None in (epoch["samples"], epoch["batches"]):
        return False
    size = epoch["batch_size"] or 1
    return bool((epoch["batches"] + 1) * size > epoch["samples"])


def share_samples(
    mine: dict[int, list[int]], others: dict[int, list[int]]
) -> int:
    """How many both have read, if a column is equal, and no constant."""
    both = mine.keys() & others.keys()
    pairs = [zip(mine[index], others[index], strict=False) for index in both]
    for column in zip(*pairs, strict=False):
        is_equal = all(one == other for one, other in column)
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


def share_content(
    mine: dict[int, list[int]], others: dict[int, list[int]]
) -> int:
    """How many both have read, if they are many, wherever they lie."""
    kinds = set(map(tuple, mine.values()))
    both = kinds & set(map(tuple, others.values()))
    are_many = len(both) >= max(SHARED + 1, len(kinds) / 5)
    are_unique = len(kinds) > UNIQUE * len(mine)
    return len(both) if are_many and are_unique and () not in both else 0
