"""The first collective of eight ranks."""

from instruments.trace_drawing.svg import (
    PANEL,
    RANK_COLOURS,
    number,
    rect,
    style,
    svg,
    text,
)
from instruments.trace_tables import read

RULES = (
    PANEL,
    "bar { fill: currentColor; }",
    "number { fill: var(--bg, #ffffff); font-weight: 600; }",
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
    shapes = [style(stem, RANK_COLOURS, RULES)]
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
