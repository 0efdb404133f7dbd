"""The simulator beside two recordings of this machine: `pytest -s` prints the tables.

Whatever goes into a prediction stands in the same recording. A CPU makes two things different from
a GPU: an all-reduce needs the core that computes (`stolen`), and whatever else runs on the machine
makes a measurement longer. So the bounds are wide.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from instruments.cost import Link, ring_all_reduce_seconds
from instruments.simulator import Layer, buckets, simulate
from miniddp.bucket import MIB

RECORDINGS = Path(__file__).parents[2] / "recordings"
VALUES = "application/vnd.miniddp.values+json"
Row = tuple[str, float, float]  # what, predicted and measured milliseconds


def outputs(run: str) -> list[tuple[str, dict[str, Any]]]:
    notebook = json.loads((RECORDINGS / f"{run}.cpu.ipynb").read_text())
    return [
        (cell["metadata"].get("name", ""), output["data"])
        for cell in notebook["cells"]
        for output in cell.get("outputs", [])
        if "data" in output
    ]


def values(run: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for _, data in outputs(run):
        found |= data.get(VALUES, {})
    return found


def rows(run: str, cell: str) -> list[list[str]]:
    """The body of the table that a cell shows."""
    [text] = [data["text/markdown"] for name, data in outputs(run)
              if name == cell and "text/markdown" in data]  # fmt: skip
    lines = "".join(text).splitlines()[2:]
    return [[part.strip() for part in line.strip("| ").split("|")] for line in lines]


def equal_layers(count: int, forward: float, backward: float, sizes: Sequence[int]) -> list[Layer]:
    return [Layer(forward / count, backward / count, sizes) for _ in range(count)]


def scaling() -> list[Row]:
    """Two ranks with a core each: from the compute of both at once and the fitted link."""
    known, width = values("11-scaling"), 512
    sizes = [4 * width * width, 4 * width]
    assert known["layers"] * sum(sizes) == pytest.approx(1e6 * known["gradient_mb"])
    link = Link(1e-6 * known["alpha_us"], 1e-9 * known["beta_ns"])
    cap, found = int(known["bucket_mib"] * MIB), []
    for batch, alone, sharing, _, measured in rows("11-scaling", "where"):
        compute = 1e-3 * (float(alone) + float(sharing))
        layers = equal_layers(int(known["layers"]), compute / 3, compute * 2 / 3, sizes)
        step = simulate(
            layers,
            lambda size: ring_all_reduce_seconds(size, 2, link),
            buckets(layers, cap, cap),
            stolen=1,
        )
        found.append((f"batch {batch}", 1e3 * step.seconds, float(measured)))
    return found


def step() -> list[Row]:
    """What run 11-step predicted from inputs of its own, and measured."""
    return [
        (way, float(predicted), float(measured))
        for way, predicted, measured, _ in rows("11-step", "measured")
    ]


@pytest.mark.parametrize("recording", [scaling, step], ids=lambda each: each.__name__)
def test_a_recording_beside_its_prediction(recording: Callable[[], list[Row]]) -> None:
    found = recording()
    errors = [predicted / measured - 1 for _, predicted, measured in found]
    lines = [
        f"{what:24} {predicted:9.2f} {measured:9.2f} {100 * error:+6.0f} %"
        for (what, predicted, measured), error in zip(found, errors, strict=True)
    ]
    report = "\n".join([f"\n{recording.__name__:24} predicted  measured   error", *lines])
    print(report)
    assert len(found) >= 4, report
    assert abs(median(errors)) < 0.3, report
    assert max(map(abs, errors)) < 0.5, report
