"""Two steps of DDP as a trace to open in Perfetto: computed by the simulator, not recorded.

SmolLM2-360M on a node of eight H100, as in runs/11-step.py: first with a message per parameter
after backward, then with buckets during backward.

    python runs/step_trace.py > vis/two-steps.trace.json
"""

import json
from typing import Any

import torch
from torch import nn

from finetune.model import build_model
from instruments.flops import peak_flops
from instruments.predictions import curve_of
from instruments.simulator import COMMUNICATION, COMPUTE, AllReduce, Layer, Step, buckets, simulate

TOKENS, REACHED = 8192, 0.4  # on each rank; of the chip's peak
FLOPS = REACHED * peak_flops("NVIDIA H100 80GB HBM3")
LINK: AllReduce = curve_of("h100_8gpu").link().all_reduce_seconds


def layer_of(module: nn.Module, multiplies: bool = True) -> Layer:
    parameters = list(module.parameters())
    count = sum(parameter.numel() for parameter in parameters) if multiplies else 0
    forward = 2 * count * TOKENS / FLOPS
    return Layer(forward, 2 * forward, [parameter.nbytes for parameter in parameters])


def layers_of_smollm2() -> list[Layer]:
    """In the order of forward. The embedding is looked up: it multiplies nothing."""
    with torch.device("meta"):
        model = build_model("360m")
    inner = model.model
    layers = [
        layer_of(inner.embed_tokens, multiplies=False),
        *map(layer_of, [*inner.layers, inner.norm, model.score]),
    ]
    assert sum(sum(layer.gradient_bytes) for layer in layers) == sum(
        parameter.nbytes for parameter in model.parameters()
    )
    return layers


def steps() -> dict[str, Step]:
    layers = layers_of_smollm2()
    return {
        "a message per parameter": simulate(layers, LINK, overlapped=False),
        "buckets during backward": simulate(layers, LINK, buckets(layers)),
    }


def events(process: int, name: str, step: Step) -> list[dict[str, Any]]:
    """The step as Chrome's trace format has it, in microseconds."""
    threads = {COMPUTE: 1, COMMUNICATION: 2}
    names = [("process_name", 0, f"{name} (computed)")]
    names += [("thread_name", thread, stream) for stream, thread in threads.items()]
    labels: list[dict[str, Any]] = [
        {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": text}}
        for what, thread, text in names
    ]
    return labels + [
        {
            "ph": "X",
            "cat": "computed",
            "name": span.name.replace("bucket", "message"),
            "pid": process,
            "tid": threads[span.stream],
            "ts": round(1e6 * span.start, 3),
            "dur": round(1e6 * (span.end - span.start), 3),
        }
        for span in step.spans
        if span.end > span.start
    ]


def trace() -> str:
    """One event in a line."""
    rows = [
        json.dumps(event)
        for process, (name, step) in enumerate(steps().items(), 1)
        for event in events(process, name, step)
    ]
    return '{"displayTimeUnit": "ms", "traceEvents": [\n' + ",\n".join(rows) + "\n]}"


if __name__ == "__main__":
    print(trace())
