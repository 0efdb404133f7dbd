"""Read a trace of torch.profiler as data; `instruments.breakdown` explains it.

    python -m instruments.trace FILE…

prints what a GPU did, out of the traces of one rank or several (`instruments.trace_gpu`).
"""

import gzip
import json
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from instruments.intervals import Interval

GZIP = b"\x1f\x8b"
"""How a file that gzip compressed begins."""


class TraceError(ValueError):
    """A file that is no readable trace of training steps: one line, which and why."""


class Event(NamedTuple):
    """Something that took time.

    `start` and `end` are seconds since the trace's first event. `thread` is a thread
    of the process or a stream of the GPU; `launch` the number that a kernel shares
    with the call that launched it.
    """

    category: str
    name: str
    start: float
    end: float
    thread: str
    launch: int | None

    @property
    def interval(self) -> Interval:
        return self.start, self.end


@dataclass(frozen=True)
class Trace:
    """The events of one rank in the order of their starts, and who recorded them."""

    events: list[Event]
    rank: int
    world_size: int


def load(path: str | Path) -> Any:
    """The content of a JSON file, gzip or not. Raises `TraceError`.

    Names with control characters or bytes that are no UTF-8 are read too: the profiler
    writes them as they come.
    """
    try:
        data = Path(path).read_bytes()
        while data.startswith(GZIP):
            data = gzip.decompress(data)
        return json.loads(data.decode(errors="replace"), strict=False)
    except OSError as error:
        reason = error.strerror or "its compression is damaged"
        raise TraceError(f"cannot read the trace {path}: {reason}") from error
    except (EOFError, zlib.error) as error:
        raise TraceError(
            f"cannot read the trace {path}: it is cut off or damaged"
        ) from error
    except (ValueError, RecursionError) as error:
        raise TraceError(
            f"{path} is not a trace: it does not hold valid JSON. Expected: what "
            "torch.profiler writes, whole, gzip or not"
        ) from error


def read_trace(path: str | Path) -> Trace:
    """A Chrome trace that torch.profiler wrote, gzip or not. Raises `TraceError`."""
    content = load(path)
    try:
        rows = [
            row for row in content["traceEvents"] if row["ph"] == "X" and "cat" in row
        ]
        first = min((row["ts"] for row in rows), default=0)
        events = [_event(row, first) for row in rows]
        group = content.get("distributedInfo", {})
        rank = int(group.get("rank", 0))
        world_size = int(group.get("world_size", 1))
    except ValueError as error:
        raise TraceError(
            f"{path} is not a trace: it does not hold valid JSON"
        ) from error
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise TraceError(
            f"{path} is not a trace of torch.profiler: {error!r}"
        ) from error
    events.sort(key=lambda event: (event.start, -event.end))
    return Trace(events, rank, world_size)


def _event(row: dict[str, Any], first: float) -> Event:
    """A row of the file, in seconds after `first`, which is in its microseconds."""
    start = (row["ts"] - first) * 1e-6
    seconds = row["dur"] * 1e-6
    if not isinstance(row["name"], str) or not math.isfinite(start) or not seconds >= 0:
        raise TypeError(f"event {row['name']!r} has no name or no finite time")
    launch = row.get("args", {}).get("correlation")
    thread = f"{row['pid']}/{row['tid']}"
    return Event(row["cat"], row["name"], start, start + seconds, thread, launch)
