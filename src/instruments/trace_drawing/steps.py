"""A step of one rank: its host, its streams, and below a part of them enlarged."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from instruments.intervals import Interval, intersect, length, union
from instruments.trace_drawing.svg import (
    LEFT,
    PANEL,
    ROUNDED,
    WIDTH,
    Scale,
    axis,
    number,
    rect,
    style,
    svg,
    text,
)
from instruments.trace_tables import read
from instruments.trace_tables.events import BUFFERS
from instruments.trace_tables.rows import Row

HEIGHT = 28
"""Of a bar, in a row of 44."""

RULES = (
    PANEL,
    "pill { fill: var(--bg, #ffffff); stroke: var(--line, #8b949e); stroke-width: 1.5; }",
    "compute { fill: currentColor; }",
    "message { fill: var(--fg, #1b1f24); }",
)


class Box(NamedTuple):
    """Something the host does, from `start` to `end`, in milliseconds."""

    start: float
    end: float
    label: str = ""


class Drawing(NamedTuple):
    """A step of one rank.

    `step` and `detail` are from when to when, in milliseconds since the step began;
    the ticks are in milliseconds.
    """

    stem: str
    rank: int
    title: str
    description: str
    events: str
    streams: dict[str, str]
    host: Sequence[Box]
    step: Interval
    ticks: Sequence[float]
    detail: Interval
    detail_ticks: Sequence[float]


def interval(row: Row) -> Interval:
    """From when to when, in milliseconds."""
    start = float(row["start_us"]) / 1e3
    return start, start + float(row["duration_us"]) / 1e3


def of_stream(rows: Iterable[Row], stream: str) -> list[Interval]:
    """When the stream ran anything, in milliseconds."""
    return union(interval(row) for row in rows if row["row"] == stream)


def host_box(rows: Iterable[Row], kind: str, label: str = "") -> Box:
    """What the host did under that name."""
    start, end = interval(next(row for row in rows if row["kind"] == kind))
    return Box(start, end, label)


def columns(busy: Sequence[Interval], scale: Scale, y: float, name: str) -> list[str]:
    """A column, 1 wide, for each piece of time: as high as the share that is busy."""
    piece = (scale.end - scale.start) / WIDTH
    heights = []
    for place in range(WIDTH):
        start = scale.start + place * piece
        share = length(intersect(busy, [(start, start + piece)])) / piece
        heights.append(round(HEIGHT * share))
    drawn = []
    x = LEFT
    for height, alike in groupby(heights):
        width = len(list(alike))
        if height:
            drawn.append(rect(name, x, y + HEIGHT - height, width, height))
        x += width
    return drawn


def panel(stem: str, y: float, label: str) -> list[str]:
    return [
        rect(f"{stem}-panel", LEFT, y, WIDTH, 44, ROUNDED),
        text(6, y + 27, label, f"{stem}-muted"),
    ]


def streams(drawing: Drawing, rows: Sequence[Row], scale: Scale, y: float) -> list[str]:
    """The row of compute and that of the messages."""
    stem = drawing.stem
    compute = of_stream(rows, drawing.streams["compute"])
    messages = of_stream(rows, drawing.streams["messages"])
    return [
        *panel(stem, y, "compute"),
        f'<g class="{stem}-rank{drawing.rank}">',
        *columns(compute, scale, y + 8, f"{stem}-compute"),
        "</g>",
        *panel(stem, y + 52, "NCCL"),
        *columns(messages, scale, y + 60, f"{stem}-message"),
    ]


def host(drawing: Drawing, scale: Scale, y: float) -> list[str]:
    stem = drawing.stem
    drawn = panel(stem, y, "host")
    for box in drawing.host:
        left = scale.x(box.start)
        width = scale.x(box.end) - left
        drawn.append(rect(f"{stem}-pill", left, y + 8, width, HEIGHT, ROUNDED))
        if box.label:
            drawn.append(text(left + width / 2, y + 27, box.label, anchor="middle"))
    return drawn


def draw(drawing: Drawing) -> str:
    """The step, and below it a part of it, enlarged."""
    stem = drawing.stem
    rows = read(drawing.events)
    step = Scale(*drawing.step)
    detail = Scale(*drawing.detail)
    left = step.x(detail.start)
    right = step.x(detail.end)
    shapes = [
        style(stem, [drawing.rank], RULES),
        *host(drawing, step, 8),
        *streams(drawing, rows, step, 60),
        *axis(stem, step, 158, drawing.ticks),
        f'<path class="{stem}-rule" d="M{number(left)} 60 V156 H{number(right)} V60 Z" />',
        text(LEFT, 202, "what is in the frame, enlarged:", f"{stem}-muted"),
        *streams(drawing, rows, detail, 212),
        *axis(stem, detail, 310, drawing.detail_ticks),
    ]
    return svg(stem, 336, drawing.title, drawing.description, shapes)


def a100() -> str:
    """A step of DDP whose GPU waits for its host."""
    rows = read("resnet50_2xa100_events")
    [buffers] = [row for row in read("resnet50_2xa100_host") if row["part"] == BUFFERS]
    forward = host_box(rows, "forward", "forward")
    first_layer = forward.start + float(buffers["duration_ms"])
    return draw(
        Drawing(
            stem="trace-a100",
            rank=0,
            title="A step of DDP on an A100, as its trace has it",
            description=(
                "Measured, to scale: three rows, 220 ms from left to right. The host is "
                "busy all the time: 39 ms with the buffers, then with the layers' "
                "forward, with backward, and at the end with the optimizer. The compute "
                "stream runs short kernels with gaps between them, so that it is busy "
                "for less than a fifth of the time. NCCL's stream has two broadcasts at "
                "the beginning, hardly to be seen, and five all-reduces of two to three "
                "milliseconds during backward. Below, four milliseconds of it, "
                "enlarged: during one all-reduce the compute stream runs a few short "
                "kernels."
            ),
            events="resnet50_2xa100_events",
            streams={"compute": "stream 7", "messages": "stream 40"},
            host=[
                Box(forward.start, first_layer, "buffers"),
                Box(first_layer, forward.end, "forward"),
                host_box(rows, "backward", "backward"),
                host_box(rows, "optimizer"),
            ],
            step=(0, 222),
            ticks=(0, 50, 100, 150, 200),
            detail=(114, 118.4),
            detail_ticks=(114, 115, 116, 117, 118),
        )
    )


def v100() -> str:
    """A step with a message per parameter after all gradients."""
    rows = read("compiled_2xv100_events")
    return draw(
        Drawing(
            stem="trace-v100",
            rank=1,
            title="A step with a message per parameter on a V100, as its trace has it",
            description=(
                "Measured, to scale: three rows, 366 ms from left to right. The host "
                "runs forward, a backward that is one compiled function, and the "
                "optimizer. The compute stream is busy until the gradients are there, "
                "at 200 ms. From then until 330 ms it does next to nothing, while "
                "NCCL's stream runs 404 all-reduces one after the other, with gaps. "
                "Below, four milliseconds of these, enlarged: messages, most of them "
                "short, and between them longer gaps."
            ),
            events="compiled_2xv100_events",
            streams={"compute": "stream 7", "messages": "stream 14"},
            host=[
                host_box(rows, "Optimizer.zero_grad#SGD.zero_grad"),
                host_box(rows, "CompiledFunction", "forward"),
                host_box(rows, "CompiledFunctionBackward", "backward"),
                host_box(rows, "torch::autograd::AccumulateGrad"),
                host_box(rows, "Optimizer.step#SGD.step"),
            ],
            step=(0, 372),
            ticks=(0, 100, 200, 300),
            detail=(202, 206.4),
            detail_ticks=(202, 203, 204, 205, 206),
        )
    )
