"""`torchrun --nproc_per_node=2 -m miniddp.check train.py --its --options`."""

import argparse
import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

from miniddp.check import session
from miniddp.check.report import say

FOUND = 1
NO_GROUP = 64
ONE_RANK = 65
NO_TORCH = 66


def main() -> int:
    options = parse()
    sys.argv = [options.program, *options.arguments]
    with tempfile.TemporaryDirectory(prefix="miniddp-check-") as folder:
        verdict = str(Path(folder) / "verdict")
        watched = session.start(
            session.Options(options.steps, options.json, verdict)
        )
        has_failed = True
        try:
            watched.names = run(options.program, options.m)
            has_failed = False
        except SystemExit as end:
            has_failed = bool(end.code)
            if has_failed:
                raise
        finally:
            watched.finish(has_failed)
            lines = read(verdict)
    return judge(lines, watched.names, options.strict)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="miniddp.check", description=__doc__)
    parser.add_argument("--steps", type=int, default=30, help="to watch")
    parser.add_argument(
        "--json", action="store_true", help="one finding a line"
    )
    parser.add_argument(
        "--strict", action="store_true", help="exit with 1 if anything is found"
    )
    parser.add_argument(
        "-m", action="store_true", help="the program is a module"
    )
    parser.add_argument("program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser.parse_args()


def run(program: str, is_module: bool) -> dict[str, Any]:
    if is_module:
        return runpy.run_module(program, run_name="__main__", alter_sys=True)
    sys.path[0] = os.path.dirname(os.path.abspath(program))
    return runpy.run_path(program, run_name="__main__")


def read(file: str) -> list[str]:
    path = Path(file)
    return (
        path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    )


def judge(lines: list[str], names: dict[str, Any], is_strict: bool) -> int:
    """The exit code of a script that has ended without an error."""
    if not any(line.startswith("ranks") for line in lines):
        if not uses_torch(names):
            say("miniddp.check: the script uses no torch, nothing to watch")
            return NO_TORCH
        say("miniddp.check: the script starts no process group")
        return NO_GROUP
    if "ranks 1" in lines:
        say("miniddp.check: nothing to compare one rank with: start two")
        return ONE_RANK
    found = any(
        line.startswith("findings") and line != "findings 0" for line in lines
    )
    return FOUND if found and is_strict else 0


def uses_torch(names: dict[str, Any]) -> bool:
    """Whether the script's own names lead to torch."""
    origins = {getattr(value, "__module__", "") for value in names.values()}
    origins |= {getattr(value, "__name__", "") for value in names.values()}
    return any(str(origin).split(".")[0] == "torch" for origin in origins)


if __name__ == "__main__":
    sys.exit(main())
