"""The parts of the drawings: 440 wide, in the book's colours."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

LEFT = 78
WIDTH = 354

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


class Scale(NamedTuple):
    """Milliseconds to the places of a drawing."""

    start: float
    end: float

    def x(self, time: float) -> float:
        return LEFT + WIDTH * (time - self.start) / (self.end - self.start)


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


def rect(
    name: str, x: float, y: float, width: float, height: float, corners: str = ""
) -> str:
    return (
        f'<rect class="{name}" x="{number(x)}" y="{number(y)}" '
        f'width="{number(width)}" height="{number(height)}"{corners} />'
    )


def axis(stem: str, scale: Scale, y: float, ticks: Sequence[float]) -> list[str]:
    drawn = []
    for tick in ticks:
        x = scale.x(tick)
        drawn.append(f'<path class="{stem}-rule" d="M{number(x)} {number(y)} v5" />')
        words = f"{tick:g} ms" if tick == ticks[-1] else f"{tick:g}"
        drawn.append(text(x, y + 19, words, f"{stem}-muted", "middle"))
    return drawn
