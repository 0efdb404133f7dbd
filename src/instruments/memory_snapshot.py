"""What a snapshot of PyTorch's CUDA allocator says, without torch and without a GPU.

    python -m instruments.memory_snapshot FILE

prints it for a file of `torch.cuda.memory._dump_snapshot`, packed with gzip or not.
"""

import gzip
import pickle
import sys
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIB = 2**30
EXPECTED = "expected a file of torch.cuda.memory._dump_snapshot"
FREED = "free_completed"


@dataclass(frozen=True)
class Snapshot:
    """Bytes, when the snapshot was taken.

    Attributes:
        reserved: What the allocator holds of the GPU.
        live: What tensors occupy of that, as it is rounded up.
        peak: The most that they occupied in the recorded history.
        tensors: How many live tensors have asked for so many bytes.
        free: The sizes of the gaps in what is reserved.
    """

    reserved: int
    live: int
    peak: int
    tensors: Counter[int]
    free: list[int]

    @property
    def requested(self) -> int:
        return sum(size * count for size, count in self.tensors.items())


class _Refusing(pickle.Unpickler):
    """Reads numbers, texts, lists and dictionaries, and executes nothing."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} in it")


def read_snapshot(path: Path) -> Snapshot:
    """Raises `ValueError` with one line if it is no such file."""
    try:
        with open(path, "rb") as file:
            is_packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if is_packed else open(path, "rb") as file:
            held = _Refusing(file).load()
        return _of(held["segments"], held["device_traces"])
    except (
        pickle.UnpicklingError,
        EOFError,
        LookupError,
        TypeError,
        OSError,
        zlib.error,
    ) as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{EXPECTED}, not {path.name}: {said}") from None


def _of(segments: list[Any], histories: list[Any]) -> Snapshot:
    blocks = [block for segment in segments for block in segment["blocks"]]
    tensors = Counter(
        block["requested_size"]
        for block in blocks
        if block["state"] == "active_allocated"
    )
    live = sum(segment["allocated_size"] for segment in segments)
    return Snapshot(
        reserved=sum(segment["total_size"] for segment in segments),
        live=live,
        peak=max([live, *(_peak(history, live) for history in histories)]),
        tensors=tensors,
        free=[block["size"] for block in blocks if block["state"] == "inactive"],
    )


def _peak(history: list[Any], live: int) -> int:
    """The most that was live, going back from what is live at the end."""
    most = live
    for event in reversed(history):
        if event["action"] == "alloc":
            live -= event["size"]
        elif event["action"] == FREED:
            live += event["size"]
        most = max(most, live)
    return most


def main(path: Path) -> None:
    found = read_snapshot(path)
    for what in ("reserved", "peak", "live", "requested"):
        print(f"{what:9} {getattr(found, what) / GIB:7.2f} GiB")
    print(f"free      {sum(found.free) / GIB:7.2f} GiB in {len(found.free)} gaps")
    print("live tensors, the most bytes first:")
    for size, count in by_bytes(found)[:10]:
        print(f"  {count:6} of {size / 2**20:9.2f} MiB {size * count / GIB:7.2f} GiB")


def by_bytes(snapshot: Snapshot) -> list[tuple[int, int]]:
    """Sizes and numbers of live tensors, those with the most bytes first."""
    return sorted(snapshot.tensors.items(), key=lambda item: -item[0] * item[1])


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m instruments.memory_snapshot FILE")
    try:
        main(Path(sys.argv[1]))
    except ValueError as error:
        sys.exit(f"memory_snapshot: {error}")
