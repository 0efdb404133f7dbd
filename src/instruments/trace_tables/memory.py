"""Tables of what a GPU holds: snapshots and timelines."""

import itertools
from collections.abc import Sequence
from pathlib import Path

from instruments.memory_snapshot import GIB, by_bytes, read_snapshot
from instruments.memory_timeline import KINDS, read_timeline, steps
from instruments.trace_tables.rows import Row
from miniddp.bucket import MIB


def snapshots(files: Sequence[Path]) -> list[Row]:
    """What the allocator holds in each snapshot."""
    rows = []
    for file in files:
        found = read_snapshot(file)
        row = {
            f"{what}_gib": f"{getattr(found, what) / GIB:.2f}"
            for what in ("reserved", "peak", "live", "requested")
        }
        rows.append(row | {"gaps": str(len(found.free))})
    return rows


def live_tensors(files: Sequence[Path]) -> list[Row]:
    """How many tensors of each size are live, those with the most bytes first."""
    found = read_snapshot(files[0])
    return [
        {
            "tensors": str(count),
            "size_mib": f"{size / 2**20:.2f}",
            "together_gib": f"{size * count / GIB:.2f}",
        }
        for size, count in by_bytes(found)
        if size >= 2**20
    ]


MIB_COLUMNS = {
    "parameters": ("parameters",),
    "momentum": ("optimizer state",),
    "gradients": ("gradients",),
    "images": ("inputs",),
    "activations": ("activations",),
    "other": ("temporaries", "autograd's own", "unknown"),
}


def memory_of_step(files: Sequence[Path]) -> list[Row]:
    """What a step holds: the fullest moment of each millisecond."""
    step = steps(read_timeline(files[0]))[0]
    begin = step[0].time
    rows = []
    for millisecond, moments in itertools.groupby(
        step, key=lambda moment: int(1e3 * (moment.time - begin))
    ):
        fullest = max(moments, key=lambda moment: moment.total)
        held = dict(zip(KINDS, fullest.held, strict=True))
        row = {"at_ms": str(millisecond)}
        for column, kinds in MIB_COLUMNS.items():
            row[f"{column}_mib"] = f"{sum(held[kind] for kind in kinds) / MIB:.1f}"
        rows.append(row | {"all_mib": f"{fullest.total / MIB:.1f}"})
    return rows
