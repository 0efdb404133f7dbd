"""What is found first in each program: `python -m tests.package.check.table`.

A line for each: wrong or right, its name, what should be found and what is, with tabs between.
"""

import tempfile
from pathlib import Path

from .watched import RIGHT, findings, written
from .wrong import WRONG


def first(script: Path) -> str:
    return next((finding["name"] for finding in findings(script, may_fail=True)), "")


if __name__ == "__main__":
    for name, program in WRONG.items():
        with tempfile.TemporaryDirectory() as folder:
            found = first(written(Path(folder), program.text))
        print("wrong", name, program.finding, found, sep="\t", flush=True)
    for script in RIGHT:
        print("right", script.stem, "", first(script), sep="\t", flush=True)
