"""Speed: what a job pays for, and does not need."""

import statistics
from collections.abc import Iterator

from miniddp.check.finding import Finding, Run

STEPS = 8
WARM_UP = 2
TIMES_SLOWER = 2.0
SECONDS_SLOWER = 0.02
SHARE_OF_STEPS = 0.8


def find(run: Run) -> Iterator[Finding]:
    yield from late_rank(run)
    yield from needless_search(run)


def late_rank(run: Run) -> Iterator[Finding]:
    """It does more than the others before its backward, in most steps."""
    passes = list(run.side_by_side("backward"))[WARM_UP:]
    if len(passes) < STEPS:
        return
    rows = [[event["busy"] for event in peers] for peers in passes]
    busy = [statistics.median(column) for column in zip(*rows, strict=True)]
    rank = busy.index(max(busy))
    others = max(time for other, time in enumerate(busy) if other != rank)
    times_late = sum(is_late(row, rank) for row in rows)
    if times_late > SHARE_OF_STEPS * len(rows):
        yield run.found(
            "a rank is late",
            passes[-1][rank],
            ranks=[rank],
            rank=rank,
            slow=round(busy[rank] * 1e3),
            fast=round(others * 1e3),
        )


def is_late(row: list[float], rank: int) -> bool:
    others = max(time for other, time in enumerate(row) if other != rank)
    return row[rank] > max(TIMES_SLOWER * others, others + SECONDS_SLOWER)


def needless_search(run: Run) -> Iterator[Finding]:
    """By torch's own count of the bytes for which no gradient came."""
    steps = run.all_of_kind("step")
    sizes = [size for event in steps for size in event["unused"]]
    known = [size for size in sizes if size is not None]
    count = len(known) // len(run.ranks)
    if count >= STEPS and not any(known):
        wrap = next(e for e in run.of_kind(0, "wrap") if e["find_unused"])
        kind = "needless find_unused_parameters"
        yield run.found(kind, wrap, count=count)
