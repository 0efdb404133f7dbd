"""What is found first in each program: `python -m tests.package.check.table`.

A line for each: wrong or right, its name, what should be found and what is, with tabs between.
"""

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .watched import RIGHT, findings, written
from .wrong import WRONG

AT_ONCE = 3


def first(script: Path) -> str:
    return next((finding["name"] for finding in findings(script, may_fail=True)), "")


def of_wrong(name: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        found = first(written(Path(folder), WRONG[name].text))
    return f"wrong\t{name}\t{WRONG[name].finding}\t{found}"


def of_right(script: Path) -> str:
    return f"right\t{script.stem}\t\t{first(script)}"


if __name__ == "__main__":
    with ThreadPoolExecutor(AT_ONCE) as pool:
        print(*pool.map(of_wrong, WRONG), *pool.map(of_right, RIGHT), sep="\n")
