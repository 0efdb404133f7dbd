"""What a GPU did, out of a trace of torch.profiler (Kineto), of any version.

`instruments.trace_figures` says what it means. Times are seconds since the first event of
the file.
"""

import bisect
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from instruments.families import COMMUNICATION, COMMUNICATION_KERNELS
from instruments.intervals import Interval
from instruments.trace import TraceError, load

COMPUTE = "compute"
COPY = "copy"
KINDS = (COMPUTE, COMMUNICATION, COPY)

NANOSECOND = 9
"""Digits of a second: two moments that the file says are one have to be equal."""

_DEVICE_CATEGORIES = {
    "kernel": COMPUTE,
    "gpu_memcpy": COPY,
    "memcpy": COPY,
    "gpu_memset": COPY,
    "memset": COPY,
}
_LAUNCH_CATEGORIES = (
    "cuda_runtime",
    "cuda_driver",
    "runtime",
    "hip_runtime",
    "xpu_runtime",
)
_COMMUNICATION_KERNEL = re.compile(COMMUNICATION_KERNELS, re.IGNORECASE)
_COPY_KERNEL = re.compile(
    r"^(memcpy|memset|dma|copy(host|device))|rocclr_(copy|fill)", re.IGNORECASE
)
_MESSAGE_KINDS = {
    "allreduce": "all-reduce",
    "crossdevicereduce": "all-reduce",
    "reducescatter": "reduce-scatter",
    "allgather": "all-gather",
    "alltoall": "all-to-all",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "sendrecv": "send and receive",
    "send": "send and receive",
    "recv": "send and receive",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
}
"""By what stands in a name without its underscores; the first that fits."""

_ELEMENT_BYTES = {
    "double": 8,
    "float64": 8,
    "long": 8,
    "long int": 8,
    "int64": 8,
    "float": 4,
    "float32": 4,
    "int": 4,
    "int32": 4,
    "half": 2,
    "float16": 2,
    "bfloat16": 2,
    "short": 2,
    "byte": 1,
    "char": 1,
    "signed char": 1,
    "unsigned char": 1,
    "bool": 1,
    "uint8": 1,
    "int8": 1,
}
_UNTOLD = "?"
"""The step of a kernel that names no launch, until the kernels are in order."""

_RANK_IN_NAME = re.compile(r"(?:rank|worker)[_-]?(\d+)", re.IGNORECASE)
_OTHER_FILES = {
    b"SQLite format 3": "a database of SQLite, as Nsight Systems exports it",
    b"PK\x03\x04": "an archive: unpack it first",
    b"\x80": "a pickle, as of a memory snapshot or a flight recorder",
}


class Message(NamedTuple):
    """What a collective moved; `None` or `""` for what the trace does not tell.

    `elements` are those that this rank hands in, of `dtype`.
    """

    kind: str
    elements: int | None = None
    dtype: str = ""
    group_size: int | None = None
    group: str = ""

    @property
    def size_bytes(self) -> int | None:
        width = _ELEMENT_BYTES.get(self.dtype.lower().removeprefix("c10::"))
        if self.elements is None or width is None:
            return None
        return self.elements * width


class Work(NamedTuple):
    """What a device ran: a kernel, a copy or a fill.

    `launched` is when the host's call began, None if the trace does not hold it. `step`
    is the name of the ProfilerStep in which that was, or `""`.
    """

    kind: str
    name: str
    start: float
    end: float
    stream: str
    launched: float | None
    step: str
    message: Message | None

    @property
    def interval(self) -> Interval:
        return self.start, self.end


@dataclass(frozen=True)
class DeviceTrace:
    """What one device ran in one process.

    Attributes:
        path: The file.
        rank: Of the process; None if neither the file nor its name tells.
        device: Its number, as the file has it; in a file merged of several ranks that
            use one number, with its process.
        hardware: Its name, or `""`.
        nccl: The version, or `""`.
        clock_ns: When its times begin, in nanoseconds of the host's clock.
        work: In the order of the starts.
    """

    path: Path
    rank: int | None
    world_size: int | None
    device: str
    hardware: str
    nccl: str
    clock_ns: int
    work: list[Work]

    @property
    def steps(self) -> list[str]:
        """The names of the steps, in the order of their first kernels."""
        return list(dict.fromkeys(work.step for work in self.work if work.step))

    @property
    def messages(self) -> list[Work]:
        """The collectives, in the order of their starts."""
        return [work for work in self.work if work.message]


class _HostEvent(NamedTuple):
    name: str
    start: float
    end: float
    process: str
    thread: str
    args: dict[str, Any]


def read_devices(path: str | Path) -> list[DeviceTrace]:
    """The trace of each device in the file, gzip or not.

    Where the file has several steps, what was launched before the recording began or
    after the last step is left out, as HolisticTraceAnalysis does.

    Raises:
        TraceError: The file is none of torch.profiler, is cut off, or holds no kernel.
    """
    path = Path(path)
    _refuse_other_files(path)
    content = load(path)
    if isinstance(content, list):
        content = {"traceEvents": content}
    try:
        rows = _complete_events(content["traceEvents"])
        first = min((float(row["ts"]) for row in rows), default=0.0)
        devices = _devices(rows, first)
        properties = content.get("deviceProperties") or []
        hardware = {str(gpu.get("id")): str(gpu.get("name")) for gpu in properties}
        group = content.get("distributedInfo") or {}
        base_ns = int(content.get("baseTimeNanoseconds") or 0)
        rank = _number(group.get("rank"))
        world_size = _number(group.get("world_size"))
        nccl = str(group.get("nccl_version", ""))
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:
        raise TraceError(
            f"{path} is not a trace of torch.profiler: expected its JSON, with "
            f"traceEvents that have names and times ({error!r})"
        ) from error
    if not devices:
        raise TraceError(
            f"{path} holds no kernel of a GPU: expected a trace of torch.profiler "
            "with ProfilerActivity.CUDA"
        )
    if rank is None and (found := _RANK_IN_NAME.search(path.name)):
        rank = int(found[1])
    return [
        DeviceTrace(
            path=path,
            rank=rank,
            world_size=world_size,
            device=device,
            hardware=hardware.get(device, ""),
            nccl=nccl,
            clock_ns=base_ns + 1000 * int(first) + round(1000 * (first % 1)),
            work=work,
        )
        for device, work in sorted(devices.items())
    ]


def _refuse_other_files(path: Path) -> None:
    expected = "expected the JSON of torch.profiler, gzip or not"
    if path.suffix in (".nsys-rep", ".qdrep"):
        raise TraceError(f"{path} is a report of Nsight Systems: {expected}")
    try:
        with open(path, "rb") as file:
            head = file.read(16)
    except OSError as error:
        raise TraceError(f"cannot read the trace {path}: {error.strerror}") from error
    if not head:
        raise TraceError(f"{path} is empty: {expected}")
    for beginning, what in _OTHER_FILES.items():
        if head.startswith(beginning):
            raise TraceError(f"{path} is {what}: {expected}")


def _complete_events(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that took time."""
    return [
        row
        for row in rows
        if row.get("ph") == "X" and "cat" in row and "ts" in row and "dur" in row
    ]


def _devices(rows: Sequence[dict[str, Any]], first: float) -> dict[str, list[Work]]:
    """What each device ran, by its number."""
    host = [row for row in rows if _device_kind(row) is None]
    launches = defaultdict(list)
    steps = defaultdict(list)
    notes = defaultdict(list)
    for row in host:
        event = _host_event(row, first)
        number = event.args.get("correlation")
        if row["cat"].lower() in _LAUNCH_CATEGORIES and number is not None:
            launches[number].append(event)
        if event.name.startswith("ProfilerStep") and "gpu" not in row["cat"]:
            steps[event.process].append(event)
        if _tells_of_a_message(event):
            notes[event.process, event.thread].append(event)
    for events in (*steps.values(), *notes.values()):
        events.sort(key=lambda event: (event.start, -event.end))

    last_end = _end_of_steps(steps.values()) if launches else None
    found: dict[tuple[str, str], list[Work]] = defaultdict(list)
    for row in rows:
        kind = _device_kind(row)
        if kind is None:
            continue
        event = _host_event(row, first)
        args = event.args
        number = args.get("correlation")
        launch = _launch_of(event, launches.get(number, []))
        if last_end is not None and _is_outside(launch, number, last_end):
            continue
        step = "" if number else _UNTOLD
        told: list[_HostEvent] = []
        if launch:
            around = _innermost(steps[launch.process], launch.start)
            step = around.name if around else ""
            told = _around(notes[launch.process, launch.thread], launch)
        work = Work(
            kind=kind,
            name=event.name,
            start=event.start,
            end=event.end,
            stream=str(args.get("stream", event.thread)),
            launched=launch.start if launch else None,
            step=step,
            message=_message(event, told) if kind == COMMUNICATION else None,
        )
        found[str(args.get("device", event.process)), event.process].append(work)
    return _by_device(found)


def _by_device(found: dict[tuple[str, str], list[Work]]) -> dict[str, list[Work]]:
    """The work by device, out of that by device and process of the file."""
    numbers = [number for number, _ in found]
    devices = {}
    for (number, process), work in found.items():
        shared = numbers.count(number) > 1
        devices[f"{number} of {process}" if shared else number] = _in_order(work)
    return devices


def _in_order(work: Iterable[Work]) -> list[Work]:
    """By their starts. A kernel that names no launch is of the step of the one before."""
    ordered = []
    step = ""
    for item in sorted(work, key=lambda item: item.interval):
        if item.step == _UNTOLD:
            item = item._replace(step=step)
        step = item.step
        ordered.append(item)
    return ordered


def _is_outside(launch: _HostEvent | None, number: Any, last_end: float) -> bool:
    """Whether it was launched before the recording or after the last step.

    ROCm 6.1 tells no number of RCCL's kernels, but 0: those are kept.
    """
    if launch:
        return launch.start > last_end
    return bool(number)


def _end_of_steps(steps: Iterable[Sequence[_HostEvent]]) -> float | None:
    """When the last of the steps ends; None if there are fewer than two."""
    ends = {event.name: event.end for events in steps for event in events}
    return max(ends.values()) if len(ends) > 1 else None


def _device_kind(row: dict[str, Any]) -> str | None:
    """The kind of work; None for what the host did."""
    kind = _DEVICE_CATEGORIES.get(row["cat"].lower())
    if kind != COMPUTE:
        return kind
    if _COPY_KERNEL.search(row["name"]):
        return COPY
    if _COMMUNICATION_KERNEL.search(row["name"]):
        return COMMUNICATION
    return COMPUTE


def _host_event(row: dict[str, Any], first: float) -> _HostEvent:
    start = (float(row["ts"]) - first) * 1e-6
    seconds = float(row["dur"]) * 1e-6
    if not math.isfinite(start + seconds) or seconds < 0:
        raise ValueError(f"event {row['name']!r} has no finite time")
    return _HostEvent(
        name=str(row["name"]),
        start=round(start, NANOSECOND),
        end=round(start + seconds, NANOSECOND),
        process=str(row.get("pid")),
        thread=str(row.get("tid")),
        args=row.get("args") or {},
    )


def _launch_of(kernel: _HostEvent, launches: Sequence[_HostEvent]) -> _HostEvent | None:
    """The call of the kernel's number that is nearest before it.

    Several processes may use the same number. The clocks of host and device differ, so
    that a call may even begin after its kernel.
    """
    if not launches:
        return None
    before = [launch for launch in launches if launch.start <= kernel.start]
    nearest: _HostEvent = max(before or launches[:1], key=lambda launch: launch.start)
    return nearest


def _innermost(events: Sequence[_HostEvent], moment: float) -> _HostEvent | None:
    """Of events in order, the last that began before the moment and lasts beyond it."""
    found = bisect.bisect_right(events, moment, key=lambda event: event.start)
    around: list[_HostEvent] = [event for event in events[:found] if moment < event.end]
    return around[-1] if around else None


def _tells_of_a_message(event: _HostEvent) -> bool:
    return event.name == "record_param_comms" or event.name.startswith(
        ("nccl:", "c10d::")
    )


def _around(events: Sequence[_HostEvent], launch: _HostEvent) -> list[_HostEvent]:
    """Of a thread's events in order, those around the call, from the inside out."""
    found = bisect.bisect_right(events, launch.start, key=lambda event: event.start)
    nearest = events[max(0, found - 8) : found]
    return [event for event in reversed(nearest) if launch.start < event.end]


def _message(kernel: _HostEvent, around: Sequence[_HostEvent]) -> Message:
    """What the kernel's arguments tell, then what stands around its launch."""
    kind = ""
    elements = None
    dtype = ""
    group_size = None
    group = ""
    for event in (kernel, *around):
        args = event.args
        kind = kind or _message_kind(str(args.get("Collective name") or ""))
        if event is not kernel:
            kind = kind or _message_kind(event.name)
        if elements is None:
            elements, dtype = _elements(args)
        group_size = group_size or _number(args.get("Group size"))
        group = group or str(args.get("Process Group Name", ""))
    kind = kind or _message_kind(kernel.name)  # an all-to-all's says SendRecv
    return Message(kind or "collective", elements, dtype, group_size, group)


def _message_kind(name: str) -> str:
    named = name.replace("(anonymous namespace)::", "")
    plain = named.split("(")[0].replace("_", "").replace("-", "").lower()
    plain = plain.removeprefix("nccldevkernel").removeprefix("ncclkernel")
    return next((kind for part, kind in _MESSAGE_KINDS.items() if part in plain), "")


def _elements(args: dict[str, Any]) -> tuple[int | None, str]:
    """How many elements an event says that were handed in, and of which type."""
    told = _number(args.get("In msg nelems", args.get("In msg size")))
    if told is not None:
        return told, str(args.get("dtype", ""))
    dims = args.get("Input Dims")
    types = args.get("Input type")
    shape = dims[0] if isinstance(dims, list) and dims else None
    while isinstance(shape, list) and shape and isinstance(shape[0], list):
        shape = shape[0]
    if not isinstance(shape, list) or not shape:
        return None, ""
    dtype = str(types[0]) if isinstance(types, list) and types else ""
    return math.prod(shape), dtype


def _number(told: Any) -> int | None:
    try:
        return int(told)
    except (TypeError, ValueError):
        return None
