"""What a step holds on a GPU."""

from instruments.memory import bytes_per_parameter, resnet50_activation_bytes
from instruments.tensors import MODELS
from instruments.trace_drawing.svg import (
    LEFT,
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
from miniddp.bucket import MIB

RULES = (
    "activations { fill: currentColor; fill-opacity: 0.55; }",
    "states { fill: var(--fg, #1b1f24); }",
    "gradients { fill: var(--muted, #57606a); }",
    "other { fill: var(--line, #8b949e); fill-opacity: 0.6; }",
    "formula { stroke: var(--fg, #1b1f24); stroke-width: 2; stroke-dasharray: 6 4; }",
)

AREAS = {
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
    kinds_held = [kind for kinds in AREAS.values() for kind in kinds]
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
    shapes = [style(stem, [0], RULES)]
    below = [0.0] * len(rows)
    for name, kinds in AREAS.items():
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
    shapes += _key(stem, bottom + 42)
    return svg(stem, bottom + 52, title, description, shapes)


def _key(stem: str, y: float) -> list[str]:
    drawn = []
    for x, name, words in (
        (18, "states", "parameters, momentum"),
        (222, "gradients", "gradients"),
        (330, "other", "other"),
    ):
        drawn.append(rect(f"{stem}-{name}", x, y - 11, 12, 12))
        drawn.append(text(x + 18, y, words))
    return drawn
