"""Bring GPU recordings home: check those of a folder and copy them into runs/.

    python tools/merge_recordings.py recordings

A recording is taken only if it is whole, was made on a GPU, from committed code, for a run of this
book. One that is stale does not replace one that is fresh. Needs only Python's standard library.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NoReturn

import check
import digest

ROOT = digest.ROOT


class Refused(ValueError):  # noqa: N818
    """Why a file is not taken."""


def merge(root: Path, path: Path) -> str:
    """Copy one recording into runs/; says what it is. Refused if it cannot be taken."""
    try:
        notebook = check.read_recording(path)
    except check.BadRecording as error:
        raise Refused(str(error)) from None
    carried = notebook["metadata"]["miniddp"]
    refuse_foreign(root, path, notebook)
    target = check.recording_path(root, carried["run"], "gpu")
    changes = digest.differences(carried["symbols"], digest.symbols(root, carried["run"]))
    if changes and check.freshness(root, carried["run"], "gpu")[0] == "fresh":
        raise Refused("it is stale, and the recording that is there is fresh")
    unfinished = target.with_name(f".{target.name}.unfinished")
    unfinished.write_bytes(path.read_bytes())
    unfinished.replace(target)
    state = "stale" if changes else "fresh"
    return (
        f"{carried['device']}, torch {carried['versions'].get('torch', '?')}, "
        f"{carried['date']}, commit {carried['commit'][:7]}, {state}"
    )


def refuse_foreign(root: Path, path: Path, notebook: dict[str, Any]) -> None:
    carried = notebook["metadata"]["miniddp"]
    if carried["kind"] != "gpu":
        raise Refused(f"it is a {carried['kind'].upper()} recording, expected a GPU recording")
    if path.name != f"{carried['run']}.gpu.ipynb":
        raise Refused(f"it says that it is {carried['run']}")
    if carried["run"] not in digest.run_names(root):
        raise Refused(f"runs/{carried['run']}.py does not exist")
    if carried["dirty"]:
        raise Refused("it was recorded from uncommitted code")
    problems = [*check.cell_problems(notebook), *check.machine_traces(notebook)]
    if problems:
        raise Refused(problems[0])


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"merge_recordings.py: {message} (see --help)\n")


def main(arguments: list[str], root: Path = ROOT) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where record_gpu.py put them")
    folder = parser.parse_args(arguments).folder
    if not folder.is_dir():
        parser.error(f"no folder {folder}")
    paths = sorted(folder.glob("*.ipynb"))
    if not paths:
        parser.error(f"no recording in {folder}")
    refused = 0
    for path in paths:
        try:
            print(f"{path.name}: {merge(root, path)}")
        except (Refused, digest.DigestError) as error:
            print(f"{path.name}: refused: {error}", file=sys.stderr)
            refused += 1
    check.write_status(root)
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
