"""The tables of `measurements/traces`, made from the raw traces that others published.

    python -m instruments.trace_tables FOLDER

writes them anew. `sources.toml` beside them says where each raw file is from; FOLDER holds
them as its entries `file` say.
"""

import csv
import hashlib
import io
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from instruments.trace_tables.events import bounds, events_of, host_parts
from instruments.trace_tables.memory import live_tensors, memory_of_step, snapshots
from instruments.trace_tables.rows import Row
from instruments.trace_tables.several_ranks import (
    backward,
    collectives_of_ranks,
    pending,
    ranks,
)
from instruments.trace_tables.steps import (
    A100_STEP,
    V100_STEP,
    buckets,
    messages,
    phases,
    steps,
)
from instruments.trace_tables.timed import scaling, ways

TABLES = Path(__file__).parents[3] / "measurements/traces"

MAKERS: dict[str, Callable[[Sequence[Path]], list[Row]]] = {
    "resnet50_2xa100_steps": steps,
    "resnet50_2xa100_messages": messages,
    "resnet50_2xa100_host": host_parts,
    "resnet50_2xa100_bounds": bounds,
    "resnet50_2xa100_buckets": buckets,
    "resnet50_2xa100_events": events_of(A100_STEP),
    "resnet18_8xmi300_messages": messages,
    "compiled_2xv100_steps": steps,
    "compiled_2xv100_phases": phases,
    "compiled_2xv100_events": events_of(V100_STEP),
    "dlrm_8xv100_ranks": ranks,
    "dlrm_8xv100_collectives": collectives_of_ranks,
    "hang_16_ranks": pending,
    "memory_snapshot": snapshots,
    "memory_snapshot_tensors": live_tensors,
    "resnet50_memory": memory_of_step,
    "hooks_2xrtx3090_backward": backward,
    "transformer_2xb200_ways": ways,
    "ddp_scaling_a100_v100": scaling,
}


def sources() -> dict[str, dict[str, str]]:
    """Table → where it is from."""
    found = tomllib.loads((TABLES / "sources.toml").read_text(encoding="utf-8"))
    return {name: entry for name, entry in found.items() if name != "columns"}


def raw_files(name: str, folder: Path) -> list[Path]:
    """The raw files of a table, in order: `file` may hold a pattern."""
    return sorted(folder.glob(sources()[name]["file"]))


def digest(files: Iterable[Path]) -> str:
    """SHA-256 of the files, one after the other."""
    found = hashlib.sha256()
    for file in files:
        found.update(file.read_bytes())
    return found.hexdigest()


def table(name: str, folder: Path) -> str:
    """The text of a table, made from the raw files in the folder."""
    rows = MAKERS[name](raw_files(name, folder))
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def read(name: str) -> list[Row]:
    """The rows of a table that is there."""
    with open(TABLES / f"{name}.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
