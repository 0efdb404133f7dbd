"""Exercise 10, solved."""

import itertools
from collections.abc import Sequence

from instruments.trace import Trace

Interval = tuple[float, float]


def exposed_seconds(messages: Sequence[Interval], work: Sequence[Interval]) -> float:
    intervals = [*messages, *work]
    moments = sorted({moment for each in intervals for moment in each})
    total = 0.0
    for start, end in itertools.pairwise(moments):
        if covers(messages, start, end) and not covers(work, start, end):
            total += end - start
    return total


def covers(intervals: Sequence[Interval], start: float, end: float) -> bool:
    return any(first <= start and end <= last for first, last in intervals)


def late_rank(traces: Sequence[Trace]) -> int:
    return min(traces, key=waiting_seconds).rank


def waiting_seconds(trace: Trace) -> float:
    messages = [each for each in trace.events if each.name.startswith("gloo:")]
    return exposed_seconds([message.interval for message in messages], [])
