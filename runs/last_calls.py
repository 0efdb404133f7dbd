"""The last calls of every rank, out of the dumps of torch's flight recorder.

python runs/last_calls.py build/dumps
"""

import pickle
import sys
from pathlib import Path
from typing import Any


def innermost_line(frames: list[dict[str, Any]]) -> str:
    """Where your program made the call: the first frame that is not torch's."""
    for frame in frames:
        path = Path(frame["filename"])
        if "torch" not in path.parts:
            return f"{frame['name']}, {path.name}:{frame['line']}"
    return "no line of yours"


def main(folder: Path, prefix: str = "rank_", count: int = 3) -> None:
    files = folder.glob(f"{prefix}*")
    for rank in sorted(int(file.name.removeprefix(prefix)) for file in files):
        try:
            dump = pickle.loads((folder / f"{prefix}{rank}").read_bytes())
        except (EOFError, pickle.UnpicklingError):
            print(f"rank {rank}: ended while it wrote its calls")
            continue
        for call in dump["entries"][-count:]:
            number = call["collective_seq_id"]
            name = call["profiling_name"]
            shapes = call["input_sizes"]
            line = innermost_line(call.get("frames", []))
            print(f"rank {rank}, call {number}: {name} {shapes}", end=" ")
            print(f"{call['state']}, in {line}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:3])
