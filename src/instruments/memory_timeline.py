"""What a GPU held over time, by kind: a file of torch's `export_memory_timeline`.

    python -m instruments.memory_timeline FILE

prints the fullest moment of a raw one (`….raw.json.gz`), packed with gzip or not.
"""

import gzip
import itertools
import json
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

MIB = 2**20
EXPECTED = "expected a raw file of torch.profiler's export_memory_timeline"
KINDS = (
    "parameters",
    "optimizer state",
    "inputs",
    "temporaries",
    "activations",
    "gradients",
    "autograd's own",
    "unknown",
)
"""As torch numbers them."""

GRADIENTS = KINDS.index("gradients")


class Moment(NamedTuple):
    """Bytes by kind, from this time on, in seconds since the first change."""

    time: float
    held: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.held)


def read_timeline(path: Path) -> list[Moment]:
    """What was held after each change of a training step or some.

    What was there before the recording is held from time 0 on. Raises `ValueError` with
    one line if it is no such file.
    """
    try:
        with open(path, "rb") as file:
            is_packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if is_packed else open(path, "rb") as file:
            changes = json.load(file)
        return _moments(changes)
    except (
        ValueError,
        LookupError,
        TypeError,
        EOFError,
        OSError,
        zlib.error,
    ) as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{EXPECTED}, not {path.name}: {said}") from None


def _moments(changes: Sequence[tuple[int, int, int, int]]) -> list[Moment]:
    begin = min(time for time, *_ in changes if time >= 0)
    held = [0] * len(KINDS)
    found = []
    for time, _, more_bytes, kind in changes:
        held[kind] += more_bytes
        found.append(Moment(max(0.0, 1e-9 * (time - begin)), tuple(held)))
    return found


def steps(moments: Sequence[Moment]) -> list[list[Moment]]:
    """Those of each whole step, from when all gradients have gone until they go again."""
    gone = [
        number
        for number in range(1, len(moments))
        if moments[number].held[GRADIENTS] == 0 < moments[number - 1].held[GRADIENTS]
    ]
    return [list(moments[begin:end]) for begin, end in itertools.pairwise(gone)]


def main(path: Path) -> None:
    fullest = max(read_timeline(path), key=lambda moment: moment.total)
    print(f"fullest after {fullest.time:.3f} s: {fullest.total / MIB:.1f} MiB")
    for kind, held in zip(KINDS, fullest.held, strict=True):
        print(f"  {kind:15} {held / MIB:9.1f} MiB")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m instruments.memory_timeline FILE")
    try:
        main(Path(sys.argv[1]))
    except ValueError as error:
        sys.exit(f"memory_timeline: {error}")
