"""Tables of steps that others have timed."""

import csv
import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from instruments.trace_tables.rows import Row

WAYS = {
    "naive": "a message per parameter, after backward",
    "flatten": "one message, after backward",
    "overlap": "a message per parameter, during backward",
    "overlap_sharded": "the same, optimizer's state in shards",
}


def ways(files: Sequence[Path]) -> list[Row]:
    """The steps of each way to send the gradients, and what is held after one."""
    [report] = [file for file in files if file.suffix == ".md"]
    sharded, whole = report.read_text(encoding="utf-8").split("##Non-Sharded")
    rows = []
    for name, way in WAYS.items():
        [file] = [file for file in files if f"_xl_{name}_ws" in file.name]
        with open(file, encoding="utf-8", newline="") as lines:
            times = [float(row["total_ms"]) for row in csv.DictReader(lines)]
        held = _held_after_steps(sharded if "sharded" in name else whole)
        rows.append(
            {
                "way": way,
                "step_ms": f"{statistics.mean(times):.1f}",
                "shortest_ms": f"{min(times):.1f}",
                "longest_ms": f"{max(times):.1f}",
                "held_gib": held,
            }
        )
    return rows


def _held_after_steps(text: str) -> str:
    """The most that a rank has allocated after the optimizer's step."""
    found = re.finditer(r"after_optimizer_step:\s+allocated: ([\d.]+) GB", text)
    return max((match.group(1) for match in found), key=float)


def scaling(files: Sequence[Path]) -> list[Row]:
    """Images a second, and of eight GPUs the share of eight times those of one."""
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    alone = {_kind(run): run for run in runs if run["world_size"] == 1}
    rows = []
    for run in runs:
        rate = run["images_per_sec_global"]
        share = rate / run["world_size"] / alone[_kind(run)]["images_per_sec_global"]
        rows.append(
            {
                "gpu": run["device_name"],
                "model": run["model"],
                "scaling": run["scaling_mode"],
                "precision": run["precision"],
                "gpus": str(run["world_size"]),
                "images_per_gpu": str(run["batch_size_per_gpu"]),
                "images_per_s": f"{rate:.0f}",
                "efficiency_percent": f"{100 * share:.1f}",
            }
        )
    return rows


def _kind(run: dict[str, Any]) -> tuple[str, ...]:
    return tuple(
        run[key] for key in ("device_name", "model", "scaling_mode", "precision")
    )
