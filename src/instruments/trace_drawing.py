"""Steps of published traces, drawn to scale from the tables of `measurements/traces`.

    python -m instruments.trace_drawing

writes `vis/trace-a100.svg`, `vis/trace-v100.svg`, `vis/trace-ranks.svg` and
`vis/trace-memory.svg`.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from instruments.intervals import Interval, intersect, length, union
from instruments.memory import bytes_per_parameter, resnet50_activation_bytes
from instruments.tensors import MODELS
from instruments.trace_tables import read
from instruments.trace_tables.events import BUFFERS
from instruments.trace_tables.rows import Row
from miniddp.bucket import MIB

FOLDER = Path(__file__).parents[2] / "vis"

LEFT = 78
WIDTH = 354
HEIGHT = 28
"""Of a bar, in a row of 44."""

ROUNDED = ' rx="4"'
"""A rectangle's attribute: its corners are round."""

STYLE = """\
<style>
{rules}
    .{stem}-muted {{ fill: var(--muted, #57606a); }}
    .{stem}-rule {{ fill: none; stroke: var(--muted, #57606a); stroke-width: 1; }}
    @media (prefers-color-scheme: dark) {{
      svg:root {{
{colours}
        background: var(--bg, #ffffff);
      }}
    }}
  </style>"""

PANEL = "panel { fill: var(--surface, #f6f8fa); }"
STEP_RULES = (
    PANEL,
    "pill { fill: var(--bg, #ffffff); stroke: var(--line, #8b949e); stroke-width: 1.5; }",
    "compute { fill: currentColor; }",
    "message { fill: var(--fg, #1b1f24); }",
)
RANKS_RULES = (
    PANEL,
    "bar { fill: currentColor; }",
    "number { fill: var(--bg, #ffffff); font-weight: 600; }",
)
MEMORY_RULES = (
    "activations { fill: currentColor; fill-opacity: 0.55; }",
    "states { fill: var(--fg, #1b1f24); }",
    "gradients { fill: var(--muted, #57606a); }",
    "other { fill: var(--line, #8b949e); fill-opacity: 0.6; }",
    "formula { stroke: var(--fg, #1b1f24); stroke-width: 2; stroke-dasharray: 6 4; }",
)

ROOT = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 440 {height}" role="img" '
    'aria-labelledby="{stem}-title {stem}-desc" fill="var(--fg, #1b1f24)" '
    'font-family="system-ui, sans-serif" font-size="14" '
    'style="display: block; max-width: 33rem; height: auto; margin: 0 auto">'
)

IN_DARK = {
    "fg": "#e3e7ec",
    "muted": "#a3adb8",
    "line": "#6f7a86",
    "surface": "#1b2027",
    "bg": "#14171c",
}

RANK_COLOURS = {
    0: ("#2563eb", "#7cb0ff"),
    1: ("#c2410c", "#ff9b62"),
    2: ("#15803d", "#66d08a"),
    3: ("#a21caf", "#ec8ff5"),
    4: ("#b45309", "#f5b84c"),
    5: ("#0e7490", "#5fd3e8"),
    6: ("#be123c", "#ff8fa3"),
    7: ("#4d7c0f", "#b5dd6a"),
}


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


class Scale(NamedTuple):
    """Milliseconds to the places of a drawing."""

    start: float
    end: float

    def x(self, time: float) -> float:
        return LEFT + WIDTH * (time - self.start) / (self.end - self.start)


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


def rect(
    name: str, x: float, y: float, width: float, height: float, corners: str = ""
) -> str:
    return (
        f'<rect class="{name}" x="{number(x)}" y="{number(y)}" '
        f'width="{number(width)}" height="{number(height)}"{corners} />'
    )


def style(stem: str, ranks: Iterable[int], rules: Iterable[str]) -> str:
    """Its rules, with the colours of the ranks in light and in dark."""
    lines = []
    colours = []
    for rank in ranks:
        light, dark = RANK_COLOURS[rank]
        lines.append(
            f"    .{stem}-rank{rank} {{ color: var(--rank-{rank}, {light}); }}"
        )
        colours.append(f"        --rank-{rank}: {dark};")
    lines += [f"    .{stem}-{rule}" for rule in rules]
    text_of_rules = "\n".join(lines)
    for name, dark in IN_DARK.items():
        if f"var(--{name}," in ROOT + STYLE + text_of_rules:
            colours.append(f"        --{name}: {dark};")
    return STYLE.format(stem=stem, rules=text_of_rules, colours="\n".join(colours))


def svg(
    stem: str, height: float, title: str, description: str, shapes: Iterable[str]
) -> str:
    """The text of a drawing, 440 wide."""
    lines = [
        ROOT.format(stem=stem, height=height),
        f'<title id="{stem}-title">{title}</title>',
        f'<desc id="{stem}-desc">{description}</desc>',
        *shapes,
    ]
    return "\n  ".join(lines) + "\n</svg>\n"


def number(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")


def text(x: float, y: float, words: str, name: str = "", anchor: str = "") -> str:
    classes = f' class="{name}"' if name else ""
    position = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text{classes}{position} x="{number(x)}" y="{number(y)}">{words}</text>'


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


def axis(stem: str, scale: Scale, y: float, ticks: Sequence[float]) -> list[str]:
    drawn = []
    for tick in ticks:
        x = scale.x(tick)
        drawn.append(f'<path class="{stem}-rule" d="M{number(x)} {number(y)} v5" />')
        words = f"{tick:g} ms" if tick == ticks[-1] else f"{tick:g}"
        drawn.append(text(x, y + 19, words, f"{stem}-muted", "middle"))
    return drawn


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
        style(stem, [drawing.rank], STEP_RULES),
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


def eight_ranks() -> str:
    """The first collective of eight ranks: when each began, and that all end together."""
    stem = "trace-ranks"
    rows = [row for row in read("dlrm_8xv100_collectives") if row["number"] == "0"]
    begin = 36
    width = 320
    shortest, last = min((float(row["duration_us"]), row["rank"]) for row in rows)
    longest, first = max((float(row["duration_us"]), row["rank"]) for row in rows)
    per_us = width / longest
    title = "One collective on eight ranks: all end together"
    description = (
        f"Measured, to scale: a row for each rank, {longest / 1e3:.1f} ms from left to right, "
        f"with a bar for as long as its kernel of the first all-to-all ran. Rank {first} comes "
        f"first, its bar is the longest, with {longest:,.0f} microseconds. Rank {last} comes "
        f"last, its bar is hardly to be seen, with {shortest:.0f} microseconds. All bars end at "
        "the same moment."
    )
    shapes = [style(stem, RANK_COLOURS, RANKS_RULES)]
    for place, row in enumerate(rows):
        y = 8 + 30 * place
        x = begin + per_us * float(row["start_us"])
        length_of_bar = per_us * float(row["duration_us"])
        shapes += [
            f'<g class="{stem}-rank{row["rank"]}">',
            f'<circle class="{stem}-bar" cx="16" cy="{y + 13}" r="11" />',
            rect(f"{stem}-panel", begin, y, width, 26),
            rect(f"{stem}-bar", x, y + 3, max(1, length_of_bar), 20),
            "</g>",
            text(16, y + 18, row["rank"], f"{stem}-number", "middle"),
            text(436, y + 18, f"{int(row['duration_us']):,} µs", anchor="end"),
        ]
    for tick in (0, 2, 4, 6):
        x = begin + per_us * 1e3 * tick
        shapes.append(f'<path class="{stem}-rule" d="M{number(x)} 248 v5" />')
        words = "0 ms" if tick == 0 else str(tick)
        shapes.append(text(x, 267, words, f"{stem}-muted", "middle"))
    return svg(stem, 276, title, description, shapes)


MEMORY_AREAS = {
    "trace-memory-states": ("parameters_mib", "momentum_mib"),
    "trace-memory-gradients": ("gradients_mib",),
    "trace-memory-rank0 trace-memory-activations": ("activations_mib",),
    "trace-memory-other": ("images_mib", "other_mib"),
}
"""From below: the columns of each area."""

IMAGES = 32


def memory() -> str:
    """What a step of ResNet-50 holds, beside the formulas."""
    stem = "trace-memory"
    rows = read("resnet50_memory")
    scale = Scale(0, len(rows))
    bottom = 226
    per_mib = 200 / 3000
    states = bytes_per_parameter("momentum").total * MODELS["resnet-50"].elements / MIB
    images = 4 * 3 * 224 * 224 * IMAGES / MIB
    formula = states + images + resnet50_activation_bytes(IMAGES) / MIB
    activations = [float(row["activations_mib"]) for row in rows]
    kinds_held = [kind for kinds in MEMORY_AREAS.values() for kind in kinds]
    peak = max(sum(float(row[kind]) for kind in kinds_held) for row in rows)
    title = "What a training step holds on a GPU, over time"
    description = (
        f"Measured, to scale: {len(rows)} ms from left to right. "
        "Parameters and momentum are a low band that never changes. Activations grow on it "
        f"during forward, to {max(activations):,.0f} MiB after "
        f"{activations.index(max(activations))} ms, and shrink to nothing during backward, "
        "while the gradients grow to as much as the parameters. A dashed line, the sum by "
        f"the formulas, touches the top: {formula:,.0f} MiB beside a peak of {peak:,.0f}."
    )
    shapes = [style(stem, [0], MEMORY_RULES)]
    below = [0.0] * len(rows)
    for name, kinds in MEMORY_AREAS.items():
        above = [
            base + sum(float(row[kind]) for kind in kinds)
            for base, row in zip(below, rows, strict=True)
        ]
        edge = [
            f"{number(scale.x(place))} {number(bottom - per_mib * held)}"
            for area in (list(enumerate(above)), list(enumerate(below))[::-1])
            for place, held in area
        ]
        shapes.append(f'<polygon class="{name}" points="{" ".join(edge)}" />')
        below = above
    y = bottom - per_mib * formula
    shapes += [
        f'<path class="{stem}-formula" d="M{LEFT} {number(y)} h{WIDTH}" />',
        text(LEFT + WIDTH, y - 8, f"by the formulas: {formula:,.0f} MiB", anchor="end"),
        text(scale.x(70), bottom - 90, "activations", anchor="middle"),
    ]
    for held in (0, 1000, 2000):
        y = bottom - per_mib * held
        shapes.append(f'<path class="{stem}-rule" d="M{LEFT} {number(y)} h-5" />')
        shapes.append(text(LEFT - 9, y + 5, f"{held:,}", f"{stem}-muted", "end"))
    shapes += axis(stem, scale, bottom, (0, 50, 100, 150))
    shapes += _memory_key(stem, bottom + 42)
    return svg(stem, bottom + 52, title, description, shapes)


def _memory_key(stem: str, y: float) -> list[str]:
    drawn = []
    for x, name, words in (
        (18, "states", "parameters, momentum"),
        (222, "gradients", "gradients"),
        (330, "other", "other"),
    ):
        drawn.append(rect(f"{stem}-{name}", x, y - 11, 12, 12))
        drawn.append(text(x + 18, y, words))
    return drawn


def main() -> None:
    """Write the drawings."""
    for name, drawing in DRAWINGS.items():
        (FOLDER / f"{name}.svg").write_text(drawing(), encoding="utf-8")


DRAWINGS = {
    "trace-a100": a100,
    "trace-v100": v100,
    "trace-ranks": eight_ranks,
    "trace-memory": memory,
}

if __name__ == "__main__":
    main()
