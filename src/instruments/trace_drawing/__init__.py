"""Steps of published traces, drawn to scale from the tables of `measurements/traces`.

    python -m instruments.trace_drawing

writes `vis/trace-a100.svg`, `vis/trace-v100.svg`, `vis/trace-ranks.svg` and
`vis/trace-memory.svg`.
"""

from pathlib import Path

from instruments.trace_drawing.memory import memory
from instruments.trace_drawing.ranks import eight_ranks
from instruments.trace_drawing.steps import a100, v100

FOLDER = Path(__file__).parents[3] / "vis"

DRAWINGS = {
    "trace-a100": a100,
    "trace-v100": v100,
    "trace-ranks": eight_ranks,
    "trace-memory": memory,
}
