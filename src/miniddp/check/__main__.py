"""`torchrun --nproc_per_node=2 -m miniddp.check train.py --its --options`."""

import argparse
import importlib.util
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
NO_SCRIPT = 66
STEPS = 30


def main() -> int:
    options = parse()
    sys.argv = [options.program, *options.arguments]
    why_not = why_not_a_module if options.m else why_not_a_script
    if fault := why_not(options.program):
        say(f"miniddp.check: {options.program} {fault}")
        return NO_SCRIPT
    with tempfile.NamedTemporaryFile(prefix="miniddp-check-") as verdict:
        watched = session.start(
            session.Options(
                options.steps, options.epochs, options.json, verdict.name
            )
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
            lines = verdict.read().decode().splitlines()
    return judge(lines, options.strict)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="miniddp.check", description=__doc__)
    add = parser.add_argument
    add("--steps", type=int, help=f"to watch, {STEPS} if no --epochs are given")
    add("--epochs", type=int, help="of training to watch")
    add("--json", action="store_true", help="one finding a line")
    add("--strict", action="store_true", help="exit with 1 if any is found")
    add("-m", action="store_true", help="the program is a module")
    add("program")
    add("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if options.steps is None and options.epochs is None:
        options.steps = STEPS
    counts = [options.steps, options.epochs]
    if any(count is not None and count < 1 for count in counts):
        parser.error("there is nothing to watch in less than one step or epoch")
    return options


def why_not_a_script(name: str) -> str:
    """Empty if Python can run it."""
    program = Path(name)
    if not program.exists():
        return "does not exist"
    if program.is_dir() and not (program / "__main__.py").exists():
        return "is a directory without a __main__.py"
    if program.suffix == ".ipynb":
        return "is a notebook: jupyter nbconvert --to script makes a script"
    return ""


def why_not_a_module(name: str) -> str:
    try:
        is_there = importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:  # its package, or what that imports
        is_there = not name.startswith(str(error.name))
    return "" if is_there else "is no module that Python finds from here"


def run(program: str, is_module: bool) -> dict[str, Any]:
    if is_module:
        return runpy.run_module(program, run_name="__main__", alter_sys=True)
    sys.path[0] = os.path.dirname(os.path.abspath(program))
    return runpy.run_path(program, run_name="__main__")


def judge(lines: list[str], is_strict: bool) -> int:
    """The exit code of a script that has ended without an error."""
    if "ranks 1" in lines:
        say("miniddp.check: nothing to compare one rank with: start two")
        return ONE_RANK
    if lines:
        return FOUND if "found" in lines and is_strict else 0
    say("miniddp.check: the script starts no process group")
    return NO_GROUP


if __name__ == "__main__":
    sys.exit(main())
