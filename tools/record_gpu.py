"""Record on a machine with a GPU what lacks a fresh GPU recording, within a time budget.

    python tools/record_gpu.py recordings --data-dir path/to/mrpc
    python tools/record_gpu.py recordings --data-dir path/to/mrpc --commit $(git rev-parse HEAD)

The runs are taken in the order of their worth. Each recording is in the folder the moment it is
done; `python tools/merge_recordings.py recordings` brings them into the book, on any machine.
Needs torch, transformers, matplotlib and what record.py needs; no network, no git and no Quarto.
"""

from __future__ import annotations

import argparse
import ast
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import check
import digest

ROOT = digest.ROOT
BUDGET_SECONDS = 540.0
LEAST_SECONDS = 15.0  # no run is started with less left
GRACE_SECONDS = 10.0
# What a GPU says first; the other runs follow in the order of the book.
WORTH = ("10-repair", "07-buckets", "05-ring", "14-memory", "09-train", "11-scaling", "06-sync")


def uses_a_gpu(root: Path, run: str) -> bool:
    """Whether a run takes a GPU where there is one: its provenance() does not say ``"cpu"``."""
    tree = ast.parse((root / "runs" / f"{run}.py").read_text(encoding="utf-8"))
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    for call in (call for call in calls if call.func.id == "provenance"):
        given = [word.value for word in call.keywords if word.arg == "device"] + call.args[:1]
        return not any(isinstance(value, ast.Constant) and value.value == "cpu" for value in given)
    return False


def in_order_of_worth(runs: list[str]) -> list[str]:
    first = [run for run in WORTH if run in runs]
    return first + [run for run in runs if run not in first]


def wanted(root: Path, kind: str) -> list[str]:
    """The runs without a fresh recording of this kind, most worth first."""
    runs = [run for run in digest.run_names(root) if uses_a_gpu(root, run)]
    return in_order_of_worth([r for r in runs if check.freshness(root, r, kind)[0] != "fresh"])


def record(root: Path, run: str, options: argparse.Namespace, seconds: float) -> str:
    """Record one run in a process of its own; says how it ended."""
    command = [sys.executable, str(root / "tools/record.py"), run, "--output", str(options.folder)]
    for name in ("data_dir", "commit"):
        if value := getattr(options, name):
            command += [f"--{name.replace('_', '-')}", str(value)]
    if options.allow_dirty:
        command.append("--allow-dirty")
    process = subprocess.Popen(command, cwd=root)
    try:
        return "recorded" if process.wait(seconds) == 0 else "failed"
    except subprocess.TimeoutExpired:
        end(process)
        return "stopped: the budget was spent"


def end(process: subprocess.Popen[bytes]) -> None:
    """Let record.py end its kernel and ranks; kill it if it does not."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the recordings go")
    parser.add_argument("runs", nargs="*", metavar="RUN", help="only these, in this order")
    parser.add_argument(
        "--budget", type=float, default=BUDGET_SECONDS, metavar="SECONDS", help="for all (540)"
    )
    parser.add_argument("--data-dir", type=Path, help="folder with the MRPC files")
    parser.add_argument("--commit", help="the commit of this copy, where there is no git")
    parser.add_argument("--allow-dirty", action="store_true", help="record uncommitted code")
    parser.add_argument(
        "--rehearse", action="store_true", help="on a CPU: the same way, for CPU recordings"
    )
    options = parser.parse_intermixed_args(arguments)
    if options.budget <= 0:
        parser.error("--budget must be positive")
    options.folder = options.folder.resolve()
    if options.data_dir:
        options.data_dir = options.data_dir.resolve()
    return options


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"record_gpu.py: {message} (see --help)\n")


def has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def main(arguments: list[str], root: Path = ROOT) -> int:
    started = time.monotonic()
    options = parse(arguments)
    if not options.rehearse and not has_gpu():
        print("record_gpu.py: torch sees no GPU here (--rehearse needs none)", file=sys.stderr)
        return 2
    try:
        runs = options.runs or wanted(root, "cpu" if options.rehearse else "gpu")
    except digest.DigestError as error:
        print(f"record_gpu.py: {error}", file=sys.stderr)
        return 2
    options.folder.mkdir(parents=True, exist_ok=True)
    ends = {}
    for run in runs:
        left = options.budget - (time.monotonic() - started)
        ends[run] = (
            record(root, run, options, left) if left >= LEAST_SECONDS else "not started: no time"
        )
    print()
    for run, end in ends.items():
        print(f"{run:<16} {end}")
    spent = time.monotonic() - started
    recorded = list(ends.values()).count("recorded")
    print(f"{recorded} of {len(ends)} runs recorded in {spent:.0f} s: {options.folder.name}")
    return 0 if recorded == len(ends) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
