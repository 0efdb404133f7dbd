"""Where a GPU's time went: busy, hidden and exposed, idle by cause, which rank is late.

What idle time is, and its causes, are defined as in HolisticTraceAnalysis (Meta): between
two kernels of a stream it waits for the host if the second was launched after the first
had ended, for the launch itself if the gap is short, and otherwise for something else.
"""

import itertools
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from instruments.families import COMMUNICATION
from instruments.intervals import Interval, intersect, length, subtract
from instruments.trace import TraceError
from instruments.trace_gpu import (
    COMPUTE,
    COPY,
    NANOSECOND,
    DeviceTrace,
    Message,
    Work,
)

SHORT_GAP = 30e-6
"""Seconds between two kernels that launching the second one explains."""


class Idle(NamedTuple):
    """Seconds without work, by cause."""

    host_wait: float
    kernel_wait: float
    other: float

    @property
    def total(self) -> float:
        return sum(self)


class Lead(NamedTuple):
    """Seconds from the host's call to the kernel's start: how far the host is ahead."""

    median: float
    largest: float


@dataclass(frozen=True)
class Figures:
    """Seconds of a device from the first start to the last end of some work.

    A moment with two kernels of a kind counts once. Copies are copies and fills. What
    another step ran meanwhile hides messages too, and is no idle time.

    Attributes:
        hidden: Communication while a compute kernel ran.
        exposed: The rest of the communication.
        idle: When nothing ran on any stream.
        lead: Of the kernels that compute; None if the trace holds no launches.
    """

    span: float
    compute: float
    communication: float
    copies: float
    hidden: float
    exposed: float
    idle: Idle
    lead: Lead | None


def figures(work: Sequence[Work], around: Sequence[Work] | None = None) -> Figures:
    """The figures of what a device ran, such as all of a trace.

    `around` is all that ran from the first start to the last end, if it is more.
    """
    around = work if around is None else around
    kinds: dict[str, list[Interval]] = defaultdict(list)
    for item in work:
        kinds[item.kind].append(item.interval)
    communication = kinds[COMMUNICATION]
    computing = [item.interval for item in around if item.kind == COMPUTE]
    first_start = min((item.start for item in work), default=0.0)
    last_end = max((item.end for item in work), default=0.0)
    return Figures(
        span=last_end - first_start,
        compute=length(kinds[COMPUTE]),
        communication=length(communication),
        copies=length(kinds[COPY]),
        hidden=length(intersect(communication, computing)),
        exposed=length(subtract(communication, computing)),
        idle=idle(around),
        lead=lead(work),
    )


def idle(work: Sequence[Work]) -> Idle:
    """The gaps in the work, on one stream or on several together."""
    host_wait = 0.0
    kernel_wait = 0.0
    other = 0.0
    in_order = sorted(work, key=lambda item: item.start)
    ends = itertools.accumulate((item.end for item in in_order), max)
    for end, following in zip(ends, in_order[1:], strict=False):
        gap = round(max(0.0, following.start - end), NANOSECOND)
        if following.launched is not None and following.launched > end:
            host_wait += gap
        elif gap < SHORT_GAP:
            kernel_wait += gap
        else:
            other += gap
    return Idle(host_wait, kernel_wait, other)


def idle_by_stream(work: Sequence[Work]) -> dict[str, Idle]:
    """The gaps of each stream, whatever the others do."""
    streams: dict[str, list[Work]] = defaultdict(list)
    for item in work:
        streams[item.stream].append(item)
    return {stream: idle(found) for stream, found in streams.items()}


def lead(work: Sequence[Work]) -> Lead | None:
    """How far the host is ahead of the kernels that compute."""
    leads = [
        item.start - item.launched
        for item in work
        if item.kind == COMPUTE and item.launched is not None
    ]
    if not leads:
        return None
    return Lead(statistics.median(leads), max(leads))


def of_step(trace: DeviceTrace, step: str) -> list[Work]:
    """What was launched in the step."""
    return [work for work in trace.work if work.step == step]


def figures_of_step(trace: DeviceTrace, step: str) -> Figures:
    """The figures of what was launched in the step."""
    work = of_step(trace, step)
    first_start = min(item.start for item in work)
    last_end = max(item.end for item in work)
    around = [
        item
        for item in trace.work
        if item.start <= last_end and item.end >= first_start
    ]
    return figures(work, around)


class Alike(NamedTuple):
    """Messages of the same kind, size, type and group: how many, and seconds of each."""

    message: Message
    seconds: list[float]


def alike(trace: DeviceTrace) -> list[Alike]:
    """The messages, those alike together, in the order of their first."""
    found: dict[Message, list[float]] = defaultdict(list)
    for work in trace.messages:
        if work.message:
            found[work.message].append(work.end - work.start)
    return [Alike(message, seconds) for message, seconds in found.items()]


class Place(NamedTuple):
    """What the ranks' kernels of one collective have in common.

    `number` counts those of the kind in the step and the group: kernels of different
    kinds may run on different streams, and start in another order on another rank.
    """

    step: str
    group: str
    kind: str
    number: int


class Collective(NamedTuple):
    """A collective as each rank saw it: by rank, when its kernel started and ended.

    Times are those of the ranks' clocks, since the earliest trace begins. A kernel of
    NCCL lasts from its own rank's arrival until the last rank's, and on: who arrives
    last has the shortest.
    """

    kind: str
    starts: dict[int, float]
    ends: dict[int, float]

    @property
    def seconds(self) -> dict[int, float]:
        return {rank: self.ends[rank] - self.starts[rank] for rank in self.starts}

    @property
    def last(self) -> int:
        """The rank for which it was the shortest."""
        seconds = self.seconds
        return min(seconds, key=lambda rank: seconds[rank])

    @property
    def waited(self) -> float:
        """For how long the other ranks waited for the last one, together."""
        seconds = self.seconds
        shortest = seconds[self.last]
        waits = [lasted - shortest for lasted in seconds.values()]
        return round(sum(waits), NANOSECOND)

    @property
    def spread_of_ends(self) -> float:
        return max(self.ends.values()) - min(self.ends.values())

    @property
    def together(self) -> bool:
        """Whether there was a moment in which the kernels of all ranks ran."""
        return max(self.starts.values()) < min(self.ends.values())


def collectives(traces: Sequence[DeviceTrace]) -> list[Collective]:
    """The collectives that all ranks recorded, in the order of the first rank.

    They belong together by their step, group and kind, and by their number in these.

    Raises:
        TraceError: Fewer than two ranks, a rank twice, jobs of different sizes, or no
            collective in common.
    """
    ranks = by_rank(traces)
    kernels = {rank: _by_place(trace) for rank, trace in ranks.items()}
    first, *others = kernels.values()
    places = [place for place in first if all(place in other for other in others)]
    if not places:
        raise TraceError(
            "the traces share no collective: expected one job, one step and one group "
            "of all these ranks"
        )
    return [_collective(place, ranks, kernels) for place in places]


def _collective(
    place: Place, ranks: dict[int, DeviceTrace], kernels: dict[int, dict[Place, Work]]
) -> Collective:
    starts = {}
    ends = {}
    begin_ns = min(trace.clock_ns for trace in ranks.values())
    for rank, trace in ranks.items():
        kernel = kernels[rank][place]
        later = 1e-9 * (trace.clock_ns - begin_ns)
        starts[rank] = round(later + kernel.start, NANOSECOND)
        ends[rank] = round(later + kernel.end, NANOSECOND)
    return Collective(place.kind, starts, ends)


def late_rank(together: Sequence[Collective]) -> int | None:
    """The rank that the others waited for longer than for all the rest, if any."""
    waited = waited_for(together)
    rank = max(waited, key=lambda rank: waited[rank])
    return rank if waited[rank] > sum(waited.values()) / 2 else None


def waited_for(together: Sequence[Collective]) -> dict[int, float]:
    """For how long the others waited for each rank that came last, together."""
    waited: dict[int, float] = defaultdict(float)
    for collective in together:
        waited[collective.last] += collective.waited
    return waited


def by_rank(traces: Sequence[DeviceTrace]) -> dict[int, DeviceTrace]:
    """The traces by rank: what their files say, else their place among the traces.

    Raises:
        TraceError: Fewer than two, a rank twice, or jobs of different sizes.
    """
    if len(traces) < 2:
        raise TraceError("expected the traces of two ranks or more")
    sized = [trace for trace in traces if trace.world_size is not None]
    for trace in sized[1:]:
        if trace.world_size != sized[0].world_size:
            raise TraceError(
                f"{sized[0].path} is of a job of {sized[0].world_size} ranks, "
                f"{trace.path} of one of {trace.world_size}: expected one job's traces"
            )
    devices = {(trace.path, trace.device) for trace in traces}
    of_one_file = len({path for path, _ in devices}) == 1 and len(devices) > 1
    found: dict[int, DeviceTrace] = {}
    for place, trace in enumerate(traces):
        rank = place if trace.rank is None or of_one_file else trace.rank
        if rank in found:
            raise TraceError(
                f"{found[rank].path} and {trace.path} are both of rank {rank}: "
                "expected one trace of each rank"
            )
        found[rank] = trace
    return dict(sorted(found.items()))


def _by_place(trace: DeviceTrace) -> dict[Place, Work]:
    """The collectives by their places."""
    counts: dict[tuple[str, str, str], int] = defaultdict(int)
    found = {}
    for work in trace.messages:
        if not work.message:
            continue
        alike = (work.step, work.message.group, work.message.kind)
        found[Place(*alike, counts[alike])] = work
        counts[alike] += 1
    return found
