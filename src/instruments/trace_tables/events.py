"""Tables of one step event by event, of its device and of its host."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from instruments.breakdown import recorded_steps
from instruments.trace import Event, Trace, read_trace
from instruments.trace_figures import figures_of_step, of_step
from instruments.trace_gpu import Work, read_devices
from instruments.trace_tables.rows import Row, micro, milli
from instruments.trace_tables.steps import A100_STEP

HOST_CATEGORIES = ("cpu_op", "user_annotation")

BUFFERS = "buffers, before the first layer"
INTO_BUCKETS = "copies of gradients into buckets"
OUT_OF_BUCKETS = "copies of gradients out of buckets"


def events_of(step: str) -> Callable[[Sequence[Path]], list[Row]]:
    """All that ran on the device in a step, and what the host did meanwhile."""

    def events(files: Sequence[Path]) -> list[Row]:
        [device] = read_devices(files[0])
        host = read_trace(files[0])
        begin = _step(host, step)
        rows = [_host_row(found, begin) for found in outermost(host, begin)]
        rows += [_device_row(item, begin) for item in of_step(device, step)]
        return rows

    return events


def _step(host: Trace, name: str) -> Event:
    return next(step for step in recorded_steps(host) if step.name == name)


def outermost(host: Trace, step: Event) -> list[list[Event]]:
    """What each thread of the host did in the step, those in others left out.

    Those of a thread that follow each other and have the same name are together.
    """
    threads: dict[str, list[Event]] = {}
    process = step.thread.split("/")[0]
    for event in host.events:
        is_of_host = event.category in HOST_CATEGORIES
        is_in_step = step.start <= event.start < step.end
        if event is step or not is_of_host or not is_in_step:
            continue
        if event.thread.split("/")[0] != process:
            continue
        found = threads.setdefault(event.thread, [])
        if not found or event.start >= found[-1].end:
            found.append(event)
    together = []
    for found in threads.values():
        for _, alike in itertools.groupby(found, key=lambda event: event.name):
            together.append(list(alike))
    return sorted(together, key=lambda alike: alike[0].start)


def _host_row(found: Sequence[Event], step: Event) -> Row:
    on_loop = found[0].thread == step.thread
    return {
        "row": "host" if on_loop else "autograd",
        "kind": found[0].name.split("function: ")[-1].strip("# "),
        "start_us": micro(found[0].start - step.start),
        "duration_us": micro(found[-1].end - found[0].start),
        "launched_us": "",
        "elements": "",
    }


def _device_row(item: Work, step: Event) -> Row:
    elements = item.message.elements if item.message else None
    return {
        "row": f"stream {item.stream}",
        "kind": item.message.kind if item.message else item.kind,
        "start_us": micro(item.start - step.start),
        "duration_us": micro(item.end - item.start),
        "launched_us": ""
        if item.launched is None
        else micro(item.launched - step.start),
        "elements": "" if elements is None else str(elements),
    }


def host_parts(files: Sequence[Path]) -> list[Row]:
    """What the host did in the step of `A100_STEP`, in its parts."""
    host = read_trace(files[0])
    step = _step(host, A100_STEP)
    inside = [
        event
        for event in host.events
        if event.category in HOST_CATEGORIES and step.start <= event.start < step.end
    ]

    def called(name: str) -> list[Event]:
        return [event for event in inside if event.name == name]

    [ddp] = called("DistributedDataParallel.forward")
    first_layer = called("aten::conv2d")[0]
    rows = [_part("step", step.end - step.start)]
    for name in ("forward", "backward", "optimizer"):
        [region] = called(f"## {name} ##")
        rows.append(_part(name, region.end - region.start))
    rows.append(_part(BUFFERS, first_layer.start - ddp.start))
    for part, name in (
        (INTO_BUCKETS, "torch::distributed::reducer::mul_out"),
        (OUT_OF_BUCKETS, "torch.distributed.ddp.reducer::copy_bucket_to_grad"),
    ):
        calls = called(name)
        rows.append(
            _part(part, sum(call.end - call.start for call in calls), len(calls))
        )
    return rows


def _part(part: str, seconds: float, calls: int = 1) -> Row:
    return {"part": part, "calls": str(calls), "duration_ms": milli(seconds)}


def bounds(files: Sequence[Path]) -> list[Row]:
    """How many times as fast the step would be at most without each of its parts."""
    host = read_trace(files[0])
    step = _step(host, A100_STEP)
    period = step.end - step.start
    [device] = read_devices(files[0])
    found = figures_of_step(device, A100_STEP)
    busy = found.span - found.idle.total
    host_ms = {row["part"]: float(row["duration_ms"]) for row in host_parts(files)}
    parts = {
        "time in which the GPU has no work": period - busy,
        BUFFERS: host_ms[BUFFERS] / 1e3,
        OUT_OF_BUCKETS: host_ms[OUT_OF_BUCKETS] / 1e3,
        "exposed messages": found.exposed,
    }
    return [
        {
            "part": part,
            "duration_ms": milli(seconds),
            "share_percent": f"{100 * seconds / period:.1f}",
            "at_most": f"{period / (period - seconds):.2f}",
        }
        for part, seconds in parts.items()
    ]
