"""Sets of moments: unions, intersections and differences of intervals of time.

An interval is a pair `(start, end)`. Every function takes intervals in any order,
overlapping or empty, and returns disjoint ones in order, none of them empty.
"""

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The moments in at least one of the intervals."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if start >= end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersect(first: Iterable[Interval], second: Iterable[Interval]) -> list[Interval]:
    """The moments in an interval of each."""
    left = union(first)
    right = union(second)
    common: list[Interval] = []
    i = 0
    j = 0
    while i < len(left) and j < len(right):
        start = max(left[i][0], right[j][0])
        end = min(left[i][1], right[j][1])
        if start < end:
            common.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return common


def subtract(first: Iterable[Interval], second: Iterable[Interval]) -> list[Interval]:
    """The moments in the first, but not in the second."""
    left = union(first)
    if not left:
        return []
    gaps: list[Interval] = []
    begin = left[0][0]
    for start, end in union(second):
        gaps.append((begin, start))
        begin = end
    gaps.append((begin, max(begin, left[-1][1])))
    return intersect(left, gaps)


def length(intervals: Iterable[Interval]) -> float:
    """How long the intervals last together; a moment in several of them counts once."""
    return sum(end - start for start, end in union(intervals))
