"""What the runs import to put values, tables, figures and each rank's text on the book's pages.

In a notebook the helpers display what the book quotes; in a plain script they print it:

    python runs/05-ring.py
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import math
import numbers
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VALUES = "application/vnd.miniddp.values+json"
RANKS = "application/vnd.miniddp.ranks+json"
TIMELINE = "application/vnd.miniddp.timeline+json"

RANK_COLORS = (
    "#2563eb",
    "#c2410c",
    "#15803d",
    "#a21caf",
    "#b45309",
    "#0e7490",
    "#be123c",
    "#4d7c0f",
)
"""The colour of each rank, the same on every page."""

FOREGROUND, MUTED, LINE, SURFACE, BACKGROUND = "#1b1f24", "#57606a", "#8b949e", "#f6f8fa", "#ffffff"
WAITING = RANK_COLORS[6]

# The page's name of each colour, so that a figure follows light and dark.
PAGE_COLORS = {
    **{color: f"--rank-{rank}" for rank, color in enumerate(RANK_COLORS)},
    **{FOREGROUND: "--fg", MUTED: "--muted", LINE: "--line", SURFACE: "--surface"},
    BACKGROUND: "--bg",
}

# What ran, for the recorder.
facts: dict[str, Any] = {"provenance": None, "data": None}


def record(**values: float | str) -> None:
    """Keep numbers or strings under names that the book's prose can quote."""
    plain = {name: _plain(name, value) for name, value in values.items()}
    if not plain:
        raise ValueError("record() needs at least one value, such as record(seconds=1.5)")
    _show({VALUES: plain}, "\n".join(f"{name} = {value}" for name, value in plain.items()))


def show_ranks(texts: Iterable[str], title: str | None = None) -> None:
    """Show what each rank printed: one text per rank, or the result of ``run_ranks``."""
    ranks = [str(text).rstrip() for text in getattr(texts, "outputs", texts)]
    bundle = {"ranks": ranks, **({"title": title} if title else {})}
    lines = [
        f"rank {rank} | {line}" for rank, text in enumerate(ranks) for line in text.split("\n")
    ]
    _show({RANKS: bundle}, "\n".join([title, *lines] if title else lines))


def table(
    rows: Iterable[Sequence[Any]], columns: Sequence[str], align: Sequence[str] | None = None
) -> None:
    """Show a table. ``align`` has an ``l`` or ``r`` per column; numbers go to the right."""
    raw = [list(row) for row in rows]
    for number, row in enumerate(raw):
        if len(row) != len(columns):
            raise ValueError(f"row {number} has {len(row)} cells, expected {len(columns)}: {row}")
    if align is None:
        align = ["r" if _is_numeric(row[i] for row in raw) else "l" for i in range(len(columns))]
    if len(align) != len(columns) or set(align) - {"l", "r"}:
        raise ValueError(f"align must have an l or r for each of {len(columns)} columns: {align}")
    cells = [list(columns), *([_cell(cell) for cell in row] for row in raw)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(columns))]
    lines = [_line(row, widths, align) for row in cells]
    rule = [
        "-" * (width - 1) + (":" if side == "r" else "-")
        for width, side in zip(widths, align, strict=True)
    ]
    escaped = [[cell.replace("|", r"\|") for cell in row] for row in cells]
    markdown = [_pipes(row) for row in (escaped[0], rule, *escaped[1:])]
    _show({"text/markdown": "\n".join(markdown)}, "\n".join(lines))


def figure(fig: Figure) -> None:
    """Show a matplotlib figure as SVG that follows the page's colours, then close it."""
    import matplotlib.pyplot as plt

    _show({"image/svg+xml": _svg(fig)}, _describe(fig))
    plt.close(fig)


def timeline(
    recordings: Iterable[Any], parameters: Sequence[Sequence[str]], step: int | None = None
) -> None:
    """Show one backward pass, bucket by bucket, as a diagram that readers can look into.

    ``recordings`` holds one ``instruments.timeline.Timeline`` per rank, or its ``to_json()``. Each
    needs ``note("backward")`` before the backward pass and ``note("end")`` after it.
    ``parameters`` names the parameters of each bucket. ``step`` is the last one if not given.
    """
    import matplotlib.pyplot as plt

    ranks = [_pass_of(recording, rank, step) for rank, recording in enumerate(recordings)]
    sizes = [[int(row["bytes"]) for row in rows] for rows, _, _ in ranks]
    if not ranks or any(size != sizes[0] for size in sizes):
        raise ValueError(f"every rank must have the same buckets, not {sizes} bytes")
    if len(parameters) != len(sizes[0]):
        raise ValueError(f"names for {len(parameters)} buckets, expected {len(sizes[0])}")
    bundle = {
        "step": int(ranks[0][0][0]["step"]),
        "buckets": [
            {"bytes": size, "parameters": list(names)}
            for size, names in zip(sizes[0], parameters, strict=True)
        ],
        "ranks": [
            {
                "end": round(end - begin, 7),
                **{
                    event: [round(row[event] - begin, 7) for row in rows]
                    for event in ("ready", "launched", "done")
                },
            }
            for rows, begin, end in ranks
        ],
    }
    lines = [
        f"rank {rank} | bucket {row['bucket']}: {row['bytes']:,.0f} bytes, "
        + ", ".join(
            f"{event} {1000 * (row[event] - begin):.2f} ms"
            for event in ("ready", "launched", "done")
        )
        for rank, (rows, begin, _) in enumerate(ranks)
        for row in rows
    ]
    fig = _drawn(bundle)
    _show({TIMELINE: bundle, "image/svg+xml": _svg(fig)}, "\n".join(lines))
    plt.close(fig)


def provenance(
    device: Any, world_size: int | Iterable[int], backend: str | Iterable[str] | None
) -> None:
    """Say once per run on what it ran: the device type, the numbers of ranks, the backends."""
    if facts["provenance"] is not None and "ipykernel" not in sys.modules:
        raise RuntimeError("provenance() was called twice, expected once per run")
    kind = str(device).partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, not {kind!r}")
    sizes = [world_size] if isinstance(world_size, int) else list(world_size)
    backends = [backend] if isinstance(backend, str) else list(backend or [])
    facts["provenance"] = {"device": kind, "world_size": sizes, "backend": backends}
    ranks = " and ".join(map(str, sizes))
    over = f" over {' and '.join(backends)}" if backends else ""
    print(f"{kind}: {ranks} {'rank' if sizes == [1] else 'ranks'}{over}")


def data_dir() -> Path | None:
    """The folder given by ``--data-dir`` (or DATA_DIR of ``make record``); None if not given."""
    given = os.environ.get("MINIDDP_DATA_DIR") or _option("--data-dir")
    if not given:
        facts["data"] = "hub or sample"
        return None
    folder = Path(given)
    if not folder.is_dir():
        raise FileNotFoundError(f"--data-dir: no folder {given}")
    facts["data"] = "folder"
    return folder


# Timelines


def _pass_of(recording: Any, rank: int, step: int | None) -> tuple[list[Any], float, float]:
    """The buckets of one step in their order, and when its backward pass began and ended."""
    if hasattr(recording, "to_json"):
        recording = recording.to_json()
    data = json.loads(recording) if isinstance(recording, str) else recording
    steps = sorted({row["step"] for row in data["events"]})
    chosen = step if step is not None else (steps or [None])[-1]
    rows = sorted((r for r in data["events"] if r["step"] == chosen), key=lambda r: r["bucket"])
    if not rows:
        raise ValueError(f"the timeline of rank {rank} has no step {chosen} (it has: {steps})")
    for row in rows:
        if missing := sorted({"ready", "launched", "done"} - set(row)):
            never = " or ".join(missing)
            raise ValueError(f"bucket {row['bucket']:.0f} of rank {rank} was never {never}")
    first, last = min(row["ready"] for row in rows), max(row["done"] for row in rows)
    marks = {"backward": [], "end": []}
    for mark in data["marks"]:
        marks.setdefault(mark["name"], []).append(mark["time"])
    begins = [time for time in marks["backward"] if time <= first]
    ends = [time for time in marks["end"] if begins and time > begins[-1]]
    if not ends:
        raise ValueError(
            f"the timeline of rank {rank} does not say when step {chosen} began and ended: "
            'call note("backward") before the backward pass and note("end") after it'
        )
    return rows, begins[-1], max(ends[0], last)


def _drawn(bundle: Mapping[str, Any]) -> Figure:
    """Rank 0's pass: what backward computes, and when each bucket was ready, sent and done."""
    import matplotlib.pyplot as plt

    rank, buckets = bundle["ranks"][0], range(1, len(bundle["buckets"]) + 1)
    ready, launched, done = (
        [1000 * time for time in rank[event]] for event in ("ready", "launched", "done")
    )
    begins, end = [0, *sorted(ready)], 1000 * rank["end"]
    lengths = [till - since for since, till in itertools.pairwise(begins)]
    fig, axes = plt.subplots(figsize=(5.2, 0.9 + 0.36 * len(begins)))
    axes.axvspan(begins[-1], end, color=WAITING, alpha=0.1, linewidth=0)
    axes.barh([0] * len(lengths), lengths, 0.6, begins[:-1], color=SURFACE, edgecolor=FOREGROUND)
    axes.vlines(ready, 0.3, [row + 0.3 for row in buckets], FOREGROUND, "dotted", linewidth=1)
    axes.hlines(buckets, ready, launched, FOREGROUND, linewidth=1.5)
    sent = [till - since for since, till in zip(launched, done, strict=True)]
    axes.barh(buckets, sent, 0.6, launched, color=RANK_COLORS[0], alpha=0.3)
    axes.barh(buckets, sent, 0.6, launched, color="none", edgecolor=RANK_COLORS[0], linewidth=1.5)
    axes.set(xlim=(0, end), ylim=(len(buckets) + 0.5, -0.5), xlabel="ms")
    axes.set_yticks([0, *buckets], ["backward", *(f"bucket {row - 1}" for row in buckets)])
    axes.grid(visible=False, axis="y")
    axes.set_title("backward computes", color=MUTED)
    axes.set_title("waits", loc="right", color=MUTED)
    return fig


# Showing


def _show(bundle: Mapping[str, Any], text: str) -> None:
    """Display in a notebook, print in a script."""
    if "ipykernel" not in sys.modules:
        print(text)
        return
    from IPython.display import display

    display({**bundle, "text/plain": text}, raw=True)


def _option(name: str) -> str | None:
    for i, argument in enumerate(sys.argv):
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
        if argument == name and i + 1 < len(sys.argv):
            return sys.argv[i + 1]
    return None


def _plain(name: str, value: Any) -> int | float | str:
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError(f"{name} must be a number or a string, not {type(value).__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} is {value}, expected a finite number")
    return value


def _is_numeric(values: Iterable[Any]) -> bool:
    return all(isinstance(v, numbers.Number) or re.match(r"[-+−]?\d", str(v)) for v in values)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    return " ".join(str(value).split())


def _line(row: Sequence[str], widths: Sequence[int], align: Sequence[str]) -> str:
    padded = [
        cell.rjust(width) if side == "r" else cell.ljust(width)
        for cell, width, side in zip(row, widths, align, strict=True)
    ]
    return "  ".join(padded).rstrip()


def _pipes(row: Sequence[str]) -> str:
    return f"| {' | '.join(row)} |"


# Figures


def _style() -> None:
    try:
        import matplotlib
        from cycler import cycler
    except ModuleNotFoundError:
        return
    matplotlib.rcParams.update(
        {
            "figure.figsize": (5.2, 3.2),
            "figure.constrained_layout.use": True,
            "figure.facecolor": "none",
            "savefig.facecolor": "none",
            "savefig.transparent": True,
            "svg.fonttype": "none",
            "svg.hashsalt": os.environ.get("MINIDDP_RUN") or Path(sys.argv[0]).stem,
            "font.family": ["DejaVu Sans"],
            "font.size": 11,
            "text.color": FOREGROUND,
            "axes.facecolor": "none",
            "axes.edgecolor": LINE,
            "axes.labelcolor": MUTED,
            "axes.titlesize": 11,
            "axes.titlelocation": "left",
            "axes.prop_cycle": cycler(color=RANK_COLORS),
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.axisbelow": True,
            "axes.grid": True,
            "grid.color": LINE,
            "grid.alpha": 0.35,
            "grid.linewidth": 0.6,
            "xtick.color": LINE,
            "ytick.color": LINE,
            "xtick.labelcolor": MUTED,
            "ytick.labelcolor": MUTED,
            "xtick.labelsize": 10,
            "ytick.labelsize": 10,
            "legend.frameon": False,
            "legend.fontsize": 10,
            "lines.linewidth": 2,
            "lines.markersize": 5,
            "patch.edgecolor": LINE,
            "hatch.color": LINE,
        }
    )


def _svg(fig: Figure) -> str:
    """An SVG that can stand inside a page: scoped style, system font, ids of its own."""
    buffer = io.StringIO()
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    fig.savefig(buffer, format="svg", metadata=metadata)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<!--.*?-->\s*|<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\s*<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)
    style = "stroke-linejoin: round; stroke-linecap: butt"
    svg = svg.replace("<svg ", f'<svg style="{style}" ', 1)
    svg = re.sub(r"'DejaVu Sans'(, ('[^']*'|sans-serif))*", "system-ui, sans-serif", svg)
    return _with_own_ids(_with_page_colors(svg))


def _with_page_colors(svg: str) -> str:
    color = re.compile(r"(?<!url\()#[0-9a-fA-F]{6}\b")
    if foreign := sorted(set(color.findall(svg)) - set(PAGE_COLORS)):
        raise ValueError(
            f"the figure uses {', '.join(foreign)}, expected only colours of book.py's palette"
        )
    return color.sub(lambda match: f"var({PAGE_COLORS[match[0]]}, {match[0]})", svg)


def _with_own_ids(svg: str) -> str:
    """Drop the ids that nothing refers to; make the others stable, and unique on any page."""
    used = list(dict.fromkeys(re.findall(r'(?:url\(|href=")#([\w.-]+)', svg)))
    numbers_of = {identity: number for number, identity in enumerate(used, 1)}
    svg = re.sub(r' id="([\w.-]+)"', lambda m: m[0] if m[1] in numbers_of else "", svg)
    place = re.compile(r'( id="|url\(#|href="#)([\w.-]+)')
    unnamed = place.sub(lambda m: f"{m[1]}{numbers_of[m[2]]}", svg)
    prefix = f"f{hashlib.sha256(unnamed.encode()).hexdigest()[:8]}"
    return place.sub(lambda m: f"{m[1]}{prefix}-{m[2]}", unnamed)


def _describe(fig: Figure) -> str:
    parts = []
    for axes in fig.axes:
        labels = [label for label in axes.get_legend_handles_labels()[1] if label[:1] != "_"]
        what = f"{axes.get_ylabel() or 'y'} against {axes.get_xlabel() or 'x'}"
        parts.append(what + (f" ({', '.join(labels)})" if labels else ""))
    return f"figure: {'; '.join(parts)}"


_style()
