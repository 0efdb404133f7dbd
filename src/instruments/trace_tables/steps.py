"""Tables of one rank's steps: figures, messages, and buckets beside them."""

from collections.abc import Sequence
from pathlib import Path

from instruments.intervals import intersect, length
from instruments.tensors import MODELS
from instruments.trace_figures import Figures, figures, figures_of_step, of_step
from instruments.trace_gpu import COMPUTE, read_devices
from instruments.trace_tables.rows import Row, micro, milli
from miniddp.bucket import MIB, plan_buckets

A100_STEP = "ProfilerStep#5"
V100_STEP = "ProfilerStep#3"


def steps(files: Sequence[Path]) -> list[Row]:
    """The figures of each step, and of all."""
    [trace] = read_devices(files[0])
    rows = [
        {
            "step": step.removeprefix("ProfilerStep#"),
            **cells(figures_of_step(trace, step)),
        }
        for step in trace.steps
    ]
    return [*rows, {"step": "all", **cells(figures(trace.work))}]


def cells(found: Figures) -> Row:
    return {
        "span_ms": milli(found.span),
        "compute_ms": milli(found.compute),
        "messages_ms": milli(found.communication),
        "hidden_ms": milli(found.hidden),
        "exposed_ms": milli(found.exposed),
        "copies_ms": milli(found.copies),
        "idle_ms": milli(found.idle.total),
        "idle_percent": f"{100 * found.idle.total / found.span:.1f}",
        "host_wait_ms": milli(found.idle.host_wait),
        "kernel_wait_ms": milli(found.idle.kernel_wait),
        "other_wait_ms": milli(found.idle.other),
        "lead_us": micro(found.lead.median) if found.lead else "",
    }


def messages(files: Sequence[Path]) -> list[Row]:
    """The collectives of all steps, with the time since the step's first work."""
    [trace] = read_devices(files[0])
    rows = []
    for step in trace.steps:
        work = of_step(trace, step)
        compute = [item.interval for item in work if item.kind == COMPUTE]
        for item in work:
            if not item.message:
                continue
            rows.append(
                {
                    "step": step.removeprefix("ProfilerStep#"),
                    "collective": item.message.kind,
                    "elements": str(item.message.elements),
                    "start_ms": milli(item.start - work[0].start),
                    "duration_ms": milli(item.end - item.start),
                    "hidden_ms": milli(length(intersect([item.interval], compute))),
                }
            )
    return rows


def buckets(files: Sequence[Path]) -> list[Row]:
    """The all-reduces of `A100_STEP`, each beside a bucket that is planned for them."""
    [trace] = read_devices(files[0])
    sent = [
        work.message.elements
        for work in of_step(trace, A100_STEP)
        if work.message and work.message.kind == "all-reduce"
    ]
    parameters = MODELS["resnet-50"].parameters
    sizes = [4 * parameter.elements for parameter in parameters]
    last_first = range(len(sizes) - 1, -1, -1)
    plan = plan_buckets(sizes, ["float32"] * len(sizes), last_first, 25 * MIB, MIB)
    return [
        {
            "elements": str(elements),
            "planned_elements": str(sum(parameters[i].elements for i in bucket)),
            "first_parameter": parameters[bucket[0]].name,
            "last_parameter": parameters[bucket[-1]].name,
        }
        for elements, bucket in zip(sent, plan, strict=True)
    ]


def phases(files: Sequence[Path]) -> list[Row]:
    """Of each step, the time from the start of its first message to the end of its last."""
    [trace] = read_devices(files[0])
    rows = []
    for step in trace.steps:
        work = of_step(trace, step)
        sent = [item for item in work if item.message]
        begin = sent[0].start
        end = sent[-1].end
        inside = [item.interval for item in work if begin <= item.start < end]
        rows.append(
            {
                "step": step.removeprefix("ProfilerStep#"),
                "messages": str(len(sent)),
                "span_ms": milli(end - begin),
                "messages_ms": milli(length(item.interval for item in sent)),
                "idle_ms": milli(end - begin - length(inside)),
            }
        )
    return rows
