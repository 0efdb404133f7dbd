"""Two steps of DDP as a trace to open in Perfetto: computed by the simulator.

SmolLM2-360M on a node of eight H100: first with a message per parameter after backward,
then with buckets during backward.

    python -m instruments.step_trace > vis/two-steps.trace.json
"""

import json
from typing import Any

from instruments import h100
from instruments.predictions import curve_of
from instruments.simulator import (
    COMMUNICATION,
    COMPUTE,
    AllReduce,
    Layer,
    Span,
    Step,
)
from instruments.tensors import MODELS, compute_seconds
from instruments.tensors import layers as layers_of
from instruments.ways import OVERLAPPED, PER_PARAMETER, simulated_ways
from miniddp.bucket import MIB

TOKENS = 8192
"""On each rank."""

MODEL = MODELS["smollm2-360m-classifier"]
OPTIMIZER = h100.optimizer(MODEL.elements)
LINK: AllReduce = curve_of("h100_8gpu").link().all_reduce_seconds
"""What NVIDIA published for a node of eight H100."""

THREADS = {COMPUTE: 0, COMMUNICATION: 1}
"""Added to the process' number: the thread of that number comes first in Perfetto."""


def layers() -> list[Layer]:
    """SmolLM2-360M on one H100."""
    compute = compute_seconds(MODEL, TOKENS, h100.REACHED * h100.PEAK)
    return layers_of(MODEL, compute)


def ways() -> dict[str, Step]:
    """The step as each chapter leaves it."""
    return simulated_ways(
        layers(), LINK, 25 * MIB, MIB, h100.STOLEN, h100.COPIES, OPTIMIZER
    )


def steps() -> dict[str, Step]:
    """The two that the trace shows."""
    found = ways()
    return {name: found[name] for name in (PER_PARAMETER, OVERLAPPED)}


def labels(process: int, name: str) -> list[dict[str, Any]]:
    """What Perfetto calls a process and its two threads."""
    names = [("process_name", 0, f"{name} (computed)")]
    for stream, thread in THREADS.items():
        names.append(("thread_name", process + thread, stream))
    return [
        {
            "ph": "M",
            "name": what,
            "pid": process,
            "tid": thread,
            "args": {"name": text},
        }
        for what, thread, text in names
    ]


def events(process: int, step: Step) -> list[dict[str, Any]]:
    """The step as Chrome's trace format has it, in microseconds.

    Both ends are rounded, not the duration: Perfetto leaves out events that overlap.
    """
    found = []
    for stream, name, start, end in whole_layers(step):
        first = round(1e6 * start, 3)
        last = round(1e6 * end, 3)
        if last > first:
            found.append(
                {
                    "ph": "X",
                    "cat": "computed",
                    "name": name,
                    "pid": process,
                    "tid": process + THREADS[stream],
                    "ts": first,
                    "dur": round(last - first, 3),
                }
            )
    return found


def whole_layers(step: Step) -> list[Span]:
    """The spans with names to read, those of a layer's tensors as one.

    Messages come after what is computed.
    """
    found: list[Span] = []
    for stream in THREADS:
        before = ""
        for span in step.spans:
            if span.stream != stream:
                continue
            name = readable(span.name)
            if name == before:
                found[-1] = found[-1]._replace(end=span.end)
            else:
                found.append(span._replace(name=name))
            before = name
    return found


def readable(name: str) -> str:
    """Such as "backward layers.31" of "backward 284", "message 3" of "bucket 3"."""
    act, _, number = name.partition(" ")
    if act not in ("forward", "backward"):
        return name.replace("bucket", "message")
    parameter = MODEL.parameters[int(number)].name
    return f"{act} {'.'.join(parameter.split('.')[:2])}"


def trace() -> str:
    """One event in a line."""
    rows = []
    for process, (name, step) in enumerate(steps().items(), 1):
        for event in [*labels(process, name), *events(process, step)]:
            rows.append(json.dumps(event))
    body = ",\n".join(rows)
    return f'{{"displayTimeUnit": "ms", "traceEvents": [\n{body}\n]}}'


if __name__ == "__main__":
    print(trace())
