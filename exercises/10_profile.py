"""Exercise 10: what a rank waits for.

`exposed_seconds` says how long messages were under way while a rank did
nothing else. `late_rank` says which rank the others wait for.

- Intervals may overlap: a moment counts once.
- A message lies partly under work, partly not.
- The rank that comes last finds the others there already.
"""

from collections.abc import Sequence

from instruments.trace import Trace

Interval = tuple[float, float]


def exposed_seconds(messages: Sequence[Interval], work: Sequence[Interval]) -> float:
    """Seconds in at least one of `messages` and in none of `work`.

    Intervals are pairs (start, end) in seconds, in any order.
    """
    raise NotImplementedError("exercise 10: count the exposed seconds")


def late_rank(traces: Sequence[Trace]) -> int:
    """The rank that the others wait for, out of one trace per rank.

    `trace.events` are the events of a rank, `trace.rank` says whose. The
    messages are the events whose name begins with "gloo:".
    """
    raise NotImplementedError("exercise 10: find the late rank")
