"""What each GPU ran in a range of the program, from Nsight Systems' export to SQLite.

nsys export --type=sqlite step.nsys-rep
"""

import gzip
import json
import sqlite3
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from instruments.intervals import Interval

KERNELS = """
    select kernel.deviceId, kernel.globalPid, kernel.correlationId,
           kernel.start, kernel.end, name.value
    from CUPTI_ACTIVITY_KIND_KERNEL kernel join StringIds name on name.id = kernel.shortName
"""
LAUNCHES = """
    select globalTid, correlationId, start from CUPTI_ACTIVITY_KIND_RUNTIME
"""
RANGES = """
    select range.globalTid, coalesce(range.text, name.value), range.start, range.end,
           coalesce(range.jsonText, '')
    from NVTX_EVENTS range left join StringIds name on name.id = range.textId
    where range.end is not null
"""


@dataclass
class Range:
    """What one process launched in a range; times in nanoseconds.

    Attributes:
        device: Of its kernels.
        sizes: Of its all-reduces, in bytes.
    """

    device: int
    compute: list[Interval] = field(default_factory=list)
    messages: list[Interval] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)


def read_range(path: Path, name: str) -> list[Range]:
    """The first range of that name in each process, by device; packed with gzip or not."""
    with tempfile.NamedTemporaryFile(suffix=".sqlite") as copy:
        packed = path.suffix == ".gz"
        copy.write(gzip.decompress(path.read_bytes()) if packed else path.read_bytes())
        copy.flush()
        with sqlite3.connect(copy.name) as base:
            kernels = base.execute(KERNELS).fetchall()
            launches = base.execute(LAUNCHES).fetchall()
            ranges = base.execute(RANGES).fetchall()
    launched = {(process_of(thread), call): at for thread, call, at in launches}
    bounds: dict[int, Interval] = {}
    for thread, title, start, end, _ in ranges:
        if title == name:
            bounds.setdefault(process_of(thread), (start, end))
    found: dict[int, Range] = {}
    for device, process, call, start, end, kernel in kernels:
        key = process_of(process)
        at = launched.get((key, call))
        if at is None or key not in bounds or not _is_in(at, bounds[key]):
            continue
        of_process = found.setdefault(key, Range(device))
        kind = of_process.messages if "nccl" in kernel.lower() else of_process.compute
        kind.append((start, end))
    for thread, title, start, _, said in ranges:
        key = process_of(thread)
        if title == "ncclAllReduce" and key in found and _is_in(start, bounds[key]):
            found[key].sizes.append(json.loads(said)["Message size [bytes]"])
    return sorted(found.values(), key=lambda one: one.device)


def process_of(number: int) -> int:
    """The process in Nsight's number of a process or thread."""
    return number >> 24 & 0xFFFFFF


def _is_in(time: float, bounds: Interval) -> bool:
    return bounds[0] <= time <= bounds[1]
