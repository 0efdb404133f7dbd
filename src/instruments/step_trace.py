"""Two steps of DDP as a trace to open in Perfetto: computed by the simulator.

SmolLM2-360M on a node of eight H100: first with a message per parameter after backward,
then with buckets during backward.

    python -m instruments.step_trace > vis/two-steps.trace.json
"""

import json
from typing import Any

from instruments.flops import PEAK_TFLOPS
from instruments.models import layers_of_smollm2
from instruments.predictions import curve_of
from instruments.simulator import (
    COMMUNICATION,
    COMPUTE,
    AllReduce,
    Layer,
    Step,
    buckets,
    simulate,
)

TOKENS = 8192
"""On each rank."""

REACHED = 0.4
"""Of the chip's peak."""

FLOPS_PER_SECOND = REACHED * PEAK_TFLOPS["H100 80GB HBM3"]["bf16"] * 1e12
LINK: AllReduce = curve_of("h100_8gpu").link().all_reduce_seconds
"""What NVIDIA published for a node of eight H100."""

THREADS = {COMPUTE: 1, COMMUNICATION: 2}


def layers() -> list[Layer]:
    """SmolLM2-360M on one H100."""
    return layers_of_smollm2("360m", TOKENS, FLOPS_PER_SECOND)


def steps() -> dict[str, Step]:
    model = layers()
    return {
        "a message per parameter": simulate(model, LINK, overlapped=False),
        "buckets during backward": simulate(model, LINK, buckets(model)),
    }


def labels(process: int, name: str) -> list[dict[str, Any]]:
    """What Perfetto calls a process and its two threads."""
    names = [("process_name", 0, f"{name} (computed)")]
    for stream, thread in THREADS.items():
        names.append(("thread_name", thread, stream))
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
    """The step as Chrome's trace format has it, in microseconds."""
    return [
        {
            "ph": "X",
            "cat": "computed",
            "name": span.name.replace("bucket", "message"),
            "pid": process,
            "tid": THREADS[span.stream],
            "ts": round(1e6 * span.start, 3),
            "dur": round(1e6 * (span.end - span.start), 3),
        }
        for span in step.spans
        if span.end > span.start
    ]


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
