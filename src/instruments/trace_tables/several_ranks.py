"""Tables of several ranks: traces, flight recorders, files of Nsight Systems."""

import pickle
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from instruments.intervals import intersect, length, union
from instruments.nsys import read_range
from instruments.trace_figures import collectives, figures
from instruments.trace_gpu import DeviceTrace, read_devices
from instruments.trace_tables.rows import Row, micro, milli
from instruments.trace_tables.steps import cells
from miniddp.bucket import MIB


def _ranks(files: Sequence[Path]) -> list[DeviceTrace]:
    """The traces in an archive, by rank."""
    traces = []
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(files[0]) as archive:
            archive.extractall(folder, filter="data")
        for file in Path(folder).rglob("*.json"):
            traces += read_devices(file)
    return sorted(traces, key=lambda trace: trace.rank or 0)


def ranks(files: Sequence[Path]) -> list[Row]:
    """The figures of each rank."""
    return [
        {"rank": str(trace.rank), **cells(figures(trace.work))}
        for trace in _ranks(files)
    ]


def collectives_of_ranks(files: Sequence[Path]) -> list[Row]:
    """Each collective on each rank, in microseconds since the first rank's first."""
    traces = _ranks(files)
    found = collectives(traces)
    sizes = [work.message.elements for work in traces[0].messages if work.message]
    begin = min(found[0].starts.values())
    return [
        {
            "number": str(number),
            "collective": collective.kind,
            "elements": str(sizes[number]),
            "rank": str(rank),
            "start_us": micro(collective.starts[rank] - begin),
            "duration_us": micro(seconds),
        }
        for number, collective in enumerate(found)
        for rank, seconds in collective.seconds.items()
    ]


class _Refusing(pickle.Unpickler):
    """Reads numbers, texts, lists and dictionaries, and executes nothing."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"expected plain values, found {module}.{name}")


def pending(files: Sequence[Path]) -> list[Row]:
    """What each rank's flight recorder holds: the oldest collective that has not ended."""
    rows = []
    for file in sorted(files, key=lambda file: int(file.name.split("_")[-1])):
        with open(file, "rb") as stream:
            dump = _Refusing(stream).load()
        oldest = min(
            dump["entries"], key=lambda entry: entry["record_id"], default=None
        )
        row = {"rank": file.name.split("_")[-1], "pending": str(len(dump["entries"]))}
        rows.append({**row, **_told(oldest, dump["pg_config"])})
    return rows


def _told(entry: dict[str, Any] | None, groups: dict[str, Any]) -> Row:
    if entry is None:
        return {"collective": "", "group": "", "ranks_of_group": "", "state": ""}
    number, group = entry["process_group"]
    return {
        "collective": entry["profiling_name"].removeprefix("nccl:").strip("_"),
        "group": group,
        "ranks_of_group": groups[number]["ranks"].strip("[]"),
        "state": entry["state"],
    }


def backward(files: Sequence[Path]) -> list[Row]:
    """The messages of each rank's backward pass, and how much of them computation hides."""
    rows = []
    for found in read_range(files[0], "backward pass"):
        sent = length(union(found.messages))
        hidden = length(intersect(union(found.messages), union(found.compute)))
        rows.append(
            {
                "rank": str(found.device),
                "messages": str(len(found.messages)),
                "sent_mib": f"{sum(found.sizes) / MIB:.2f}",
                "compute_ms": milli(1e-9 * length(union(found.compute))),
                "messages_ms": milli(1e-9 * sent),
                "hidden_ms": milli(1e-9 * hidden),
                "exposed_ms": milli(1e-9 * (sent - hidden)),
            }
        )
    return rows
