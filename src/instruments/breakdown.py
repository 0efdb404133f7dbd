"""Where the time of a step goes, out of a trace: regions, work, communication."""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from instruments.families import (
    COMMUNICATION,
    FAMILIES,
    OPTIMIZER,
    OTHER,
    family,
    uses_tensor_cores,
)
from instruments.intervals import Interval, intersect, length, subtract
from instruments.trace import Event, Trace, TraceError

Spans = dict[str, list[Interval]]

GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver")


class Part(NamedTuple):
    """Seconds per step, and the share (0 to 1) of the step's time.

    `gpu_seconds` of a region: how long the GPU ran the kernels that were launched in
    it.
    """

    seconds: float
    share: float
    gpu_seconds: float | None = None


@dataclass(frozen=True)
class Breakdown:
    """Where the time of the recorded steps went, on one rank.

    The work is what the GPU ran if it ran anything, else the operators of the process.
    Two kinds of work at the same time count for both, so that shares may add up to
    more than 1.

    Attributes:
        steps: How many steps were recorded.
        step_seconds: Mean time of a step. A last step that has ended on the CPU, but
            not on the GPU, ends with its last kernel; a first one begins when the GPU
            has ended what was launched before the recording.
        regions: By name, in order of appearance. A region inside another counts for
            both.
        families: By the names of `instruments.families.FAMILIES`; "idle" is when none
            of the work ran: Python, the data loader, waiting. Optimizer is all that
            `Optimizer.step` did, except what it sent from a GPU.
        communication: While a collective or a message was under way, waiting for peers
            included.
        exposed: The part of that under which no other work ran.
        hidden: The rest of it.
        gpu_busy: The share of the time (0 to 1) in which the GPU ran anything; None
            without a GPU.
        tensor_cores: The share of the kernels' time (0 to 1) in those whose name says
            that they use tensor cores; None without a GPU.
    """

    rank: int
    world_size: int
    steps: int
    step_seconds: float
    regions: dict[str, Part]
    families: dict[str, Part]
    communication: Part
    exposed: Part
    hidden: Part
    gpu_busy: float | None
    tensor_cores: float | None

    def rows(self) -> list[tuple[str, str, float, float]]:
        """A table: kind, name, milliseconds per step, share of the step.

        The kinds are "region", "work" and "communication".
        """
        overlap = {"exposed": self.exposed, "hidden": self.hidden}
        kinds = {
            "region": self.regions,
            "work": self.families,
            "communication": overlap,
        }
        return [
            (kind, name, part.seconds * 1e3, part.share)
            for kind, named in kinds.items()
            for name, part in named.items()
        ]


def break_down(trace: Trace) -> Breakdown:
    """Where the time of the recorded steps went.

    Raises `TraceError` if the trace has no steps.
    """
    steps = recorded_steps(trace)
    kernels = kernels_of(trace)
    launches = _launches(trace)
    begin = min((event.start for event in steps), default=0.0)
    end = max((event.end for event in (*steps, *kernels)), default=0.0)
    if not steps or begin == end:
        raise TraceError(
            f"the trace of rank {trace.rank} holds no ProfilerStep: "
            "record it with a schedule and call step() at the end of each training step"
        )

    host_begin = begin
    begin = max(begin, _end_of_earlier_work(kernels, launches))

    def part(intervals: Iterable[Interval], start: float = begin) -> Part:
        seconds = length(intersect(intervals, [(start, end)]))
        return Part(seconds / len(steps), seconds / (end - begin))

    def launched_in(intervals: Sequence[Interval]) -> list[Interval]:
        return [
            kernel.interval
            for kernel in kernels
            if _launched_in(intervals, kernel, launches)
        ]

    regions = {}
    for name, intervals in region_spans(trace).items():
        regions[name] = part(intervals, host_begin)
        if kernels:
            gpu_seconds = part(launched_in(intervals)).seconds
            regions[name] = regions[name]._replace(gpu_seconds=gpu_seconds)
    spans = families_of(trace)
    communication = spans[COMMUNICATION]
    work = work_of(spans)
    spans["idle"] = subtract([(begin, end)], [*work, *communication])
    busy = [kernel.interval for kernel in kernels]
    return Breakdown(
        rank=trace.rank,
        world_size=trace.world_size,
        steps=len(steps),
        step_seconds=(end - begin) / len(steps),
        regions=regions,
        families={name: part(intervals) for name, intervals in spans.items()},
        communication=part(communication),
        exposed=part(subtract(communication, work)),
        hidden=part(intersect(communication, work)),
        gpu_busy=part(busy).share if kernels else None,
        tensor_cores=tensor_core_share(kernels),
    )


def recorded_steps(trace: Trace) -> list[Event]:
    """The steps that the profiler recorded, in their order."""
    return [
        event for event in _annotations(trace) if event.name.startswith("ProfilerStep#")
    ]


def kernels_of(trace: Trace) -> list[Event]:
    """What the GPU ran: kernels, copies and fills."""
    return [event for event in trace.events if event.category in GPU_CATEGORIES]


def families_of(trace: Trace) -> Spans:
    """When work of each family ran: on the GPU if it ran any, else in the process."""
    return kernel_families(trace) if kernels_of(trace) else operator_families(trace)


def work_of(families: Spans) -> list[Interval]:
    """When anything but communication ran."""
    work: list[Interval] = []
    for name, intervals in families.items():
        if name != COMMUNICATION:
            work += intervals
    return work


def region_spans(trace: Trace) -> Spans:
    """When the loop was in each region: an annotation that is an identifier."""
    threads = _loop_threads(trace)
    spans: Spans = defaultdict(list)
    for event in _annotations(trace):
        if event.thread in threads and event.name.isidentifier():
            spans[event.name].append(event.interval)
    return dict(spans)


def kernel_families(trace: Trace) -> Spans:
    """When the GPU ran kernels of each family.

    Communication is also when gloo sent messages from the host.
    """
    optimizer = [
        event.interval
        for event in _annotations(trace)
        if family(event.name) == OPTIMIZER
    ]
    launches = _launches(trace)
    spans: Spans = {name: [] for name in FAMILIES}
    spans[COMMUNICATION] = [event.interval for event in _gloo(trace)]
    for kernel in kernels_of(trace):
        name = family(kernel.name)
        if name != COMMUNICATION and _launched_in(optimizer, kernel, launches):
            name = OPTIMIZER
        spans[name].append(kernel.interval)
    return spans


def operator_families(trace: Trace) -> Spans:
    """When the process ran operators of each family, on any thread.

    Communication is also when gloo sent messages. The outermost operator whose name
    tells its family counts as a whole. What gloo's own threads run is part of a
    message.
    """
    gloo_threads = {event.thread for event in _gloo(trace)} - _loop_threads(trace)
    everything: list[Interval] = []
    told_until: dict[str, float] = defaultdict(float)
    spans: Spans = {name: [] for name in FAMILIES}
    for event in trace.events:
        name = family(event.name)
        is_operator = event.category == "cpu_op" or name == OPTIMIZER
        if not is_operator or event.thread in gloo_threads:
            continue
        everything.append(event.interval)
        if name != OTHER and event.start >= told_until[event.thread]:
            spans[name].append(event.interval)
            told_until[event.thread] = event.end
    spans[OTHER] = subtract(everything, itertools.chain(*spans.values()))
    spans[COMMUNICATION] += [event.interval for event in _gloo(trace)]
    return spans


def tensor_core_share(kernels: Sequence[Event]) -> float | None:
    """The share of the kernels' time (0 to 1) in those that use tensor cores.

    None without any kernel.
    """
    total = 0.0
    used = 0.0
    for event in kernels:
        if event.category != "kernel":
            continue
        seconds = event.end - event.start
        total += seconds
        if uses_tensor_cores(event.name):
            used += seconds
    return used / total if total else None


def _annotations(trace: Trace) -> list[Event]:
    return [event for event in trace.events if event.category == "user_annotation"]


def _loop_threads(trace: Trace) -> set[str]:
    return {event.thread for event in recorded_steps(trace)}


def _gloo(trace: Trace) -> list[Event]:
    return [event for event in _annotations(trace) if event.name.startswith("gloo:")]


def _launches(trace: Trace) -> dict[int, float]:
    """When the host launched each kernel, by the number that both share."""
    return {
        event.launch: event.start
        for event in trace.events
        if event.category in LAUNCH_CATEGORIES and event.launch is not None
    }


def _end_of_earlier_work(
    kernels: Iterable[Event], launches: Mapping[int, float]
) -> float:
    """When the GPU had run what was launched before the recording, which holds no call."""
    if not launches:
        return 0.0
    return max(
        (
            kernel.end
            for kernel in kernels
            if kernel.launch and kernel.launch not in launches
        ),
        default=0.0,
    )


def _launched_in(
    intervals: Iterable[Interval], kernel: Event, launches: Mapping[int, float]
) -> bool:
    if kernel.launch is None or kernel.launch not in launches:
        return False
    moment = launches[kernel.launch]
    return any(start <= moment < end for start, end in intervals)
