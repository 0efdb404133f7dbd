"""Exercise 10, solved."""

import itertools
from collections.abc import Sequence

from instruments.trace import Trace

Interval = tuple[float, float]


def exposed_seconds(messages: Sequence[Interval], work: Sequence[Interval]) -> float:
    moments = sorted({moment for interval in [*messages, *work] for moment in interval})
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
    messages = [event.interval for event in trace.events if event.name.startswith("gloo:")]
    return exposed_seconds(messages, [])
