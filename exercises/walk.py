"""Walk through an exercise: the first step that does not hold yet, and nothing behind it.

python exercises/walk.py [05] [--hint] [--watch]

A step is a test function of `test_05_ring.py`. Without a number: the first exercise that is not
solved. Exit code 0: every step holds; 1: one does not; 2: there is no such exercise.
"""

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import time
import tomllib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
NAMES = {path.stem[:2]: path.stem for path in sorted(HERE.glob("[0-9][0-9]_*.py"))}
PROGRESS = HERE / ".progress.json"
LINES = 8  # of a message


class Steps:
    """A plugin of pytest that prints nothing: which step failed, and how."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.failed: tuple[str, str, str] | None = None  # step, its values, what came

    def pytest_collection_modifyitems(self, items: list[pytest.Function]) -> None:
        self.names = list(dict.fromkeys(item.originalname for item in items))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            lines = [line for line in report.longreprtext.splitlines() if line.startswith("E ")]
            self.failed = "", "", "\n".join(line[2:].strip() for line in lines[-LINES:])

    def pytest_assertrepr_compare(self, op: str, left: object, right: object) -> list[str] | None:
        if op == "==":
            return ["", f"expected {short(right)}", f"came     {short(left)}"]
        return None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Function, call: pytest.CallInfo[None]
    ) -> Iterator[Any]:
        report = yield
        if report.failed and call.excinfo:
            values = item.callspec.params if hasattr(item, "callspec") else {}
            shown = ", ".join(f"{name}={short(value)}" for name, value in values.items())
            self.failed = (
                item.originalname,
                shown,
                what_came(call.excinfo.value, item.path.stem.removeprefix("test_")),
            )
        return report


def short(value: object) -> str:
    text = getattr(value, "__name__", "") or " ".join(repr(value).split())
    return text if len(text) <= 200 else text[:199] + "…"


def what_came(error: BaseException, exercise: str) -> str:
    """The error in a few lines, and where in the exercise: of several ranks, of the first one."""
    if stacks := getattr(error, "stacks", None):
        lines = [str(error).splitlines()[0]]
        for rank, stack in stacks.items():
            where = place(stack, exercise) or place(stack, f"test_{exercise}")
            lines.append(f"rank {rank} waits {where}")
        return "\n".join(lines[:LINES])
    if tracebacks := getattr(error, "tracebacks", None):
        rank, text = next(iter(tracebacks.items()))
        return f"{cut(message(text))}\non rank {rank}, {place(text, exercise)}".removesuffix(", ")
    where = place("".join(traceback.format_exception(error)), exercise)
    return f"{cut(f'{type(error).__name__}: {error}')}\n{where}".removesuffix("\n")


def message(text: str) -> str:
    """What a rank raised, or what it said before it was killed, without the stack."""
    dump = text.find("Fatal Python error")
    if dump >= 0:
        return text[:dump]
    lines = text.rpartition("Traceback (most recent call last):\n")[2].splitlines()
    return "\n".join(itertools.dropwhile(lambda line: line.startswith("  "), lines))


def cut(said: str) -> str:
    said = said.removeprefix("AssertionError: ").removeprefix("assert ")
    lines = [line.strip() for line in said.splitlines()]
    told = [line for line in lines if line not in ("", "assert")]
    return "\n".join(told[:LINES]).removesuffix(":")


def place(stack: str, module: str) -> str:
    """The innermost line of a module on a stack, where it has one there."""
    frames = re.findall(rf'/{module}\.py", line (\d+),? in (\w+)', stack)
    if not frames:
        return ""
    line, function = frames[-1 if "Traceback" in stack else 0]
    return f"in {function}, {module}.py line {line}"


def walk(number: str, hint: bool) -> int:
    steps = Steps()
    test = HERE / f"test_{NAMES[number]}.py"
    title = (
        (HERE / f"{NAMES[number]}.py").read_text(encoding="utf-8").split('"""')[1].split("\n")[0]
    )
    arguments = [str(test), "-x", "-p", "no:terminal", "-p", "no:cacheprovider"]
    os.environ.pop("PYTEST_ADDOPTS", None)  # the reader's own, which is for other tests
    code = pytest.main([*arguments, "-o", "addopts="], plugins=[steps])
    done = steps.names.index(steps.failed[0]) if steps.failed and steps.failed[0] else 0
    if code == 0:
        done = len(steps.names)
        print(f"{title} All {done} steps hold.")
    elif steps.failed:
        step, values, came = steps.failed
        name = step.removeprefix("test_").replace("_", " ")
        print(f"{title}\n")
        print(
            f"Step {done + 1} of {len(steps.names)}: {name}" if step else "It cannot be imported."
        )
        print("".join(f"    {line}\n" for line in [values, *came.splitlines()] if line))
        print(
            hint_of(number, step)
            if hint and step
            else f"For a hint: make exercise N={number} HINT=1"
        )
    else:
        print(f"pytest ended with code {int(code)}", file=sys.stderr)
    print(remember(number, done, len(steps.names)))
    return int(code != 0)


def hint_of(number: str, step: str) -> str:
    hints = tomllib.loads((HERE / "hints.toml").read_text(encoding="utf-8"))
    return f"Hint: {hints[number][step.removeprefix('test_')]}"


def remember(number: str, done: int, of: int) -> str:
    """How far the book's exercises are; yours only, not those of another folder."""
    progress = known()
    progress[number] = [done, of]
    if "EXERCISE_DIR" not in os.environ:
        PROGRESS.write_text(json.dumps(progress), encoding="utf-8")
    solved = [name for name in NAMES if is_solved(progress, name)]
    rest = [name for name in NAMES if name not in solved]
    following = f"; next: make exercise N={rest[0]}" if rest and number in solved else ""
    return f"{len(solved)} of {len(NAMES)} exercises are solved{following}"


def known() -> dict[str, list[int]]:
    if not PROGRESS.exists():
        return {}
    progress: dict[str, list[int]] = json.loads(PROGRESS.read_text(encoding="utf-8"))
    return progress


def is_solved(progress: dict[str, list[int]], number: str) -> bool:
    done, of = progress.get(number, (0, 1))
    return done == of > 0


def watch(number: str | None, hint: bool) -> None:
    """Walk again whenever the exercise is saved; when it is solved, go to the next one."""
    while number := number or first_unsolved():
        path = HERE / f"{NAMES[number]}.py"
        seen = path.stat().st_mtime
        print("\033[2J\033[H", end="", flush=True)
        command = [sys.executable, __file__, number, *(["--hint"] if hint else [])]
        if subprocess.run(command).returncode == 0:
            number = None
            continue
        print(f"\nWaiting for a change of exercises/{path.name} (Ctrl+C ends it)", flush=True)
        while path.stat().st_mtime == seen:
            time.sleep(0.3)


def first_unsolved() -> str | None:
    return next((name for name in NAMES if not is_solved(known(), name)), None)


def main() -> int:
    parser = argparse.ArgumentParser(prog="walk.py", description=__doc__.split("\n")[0])
    parser.add_argument("number", nargs="?", help="of the chapter, such as 05")
    parser.add_argument("--hint", action="store_true", help="show a hint for the step")
    parser.add_argument("--watch", action="store_true", help="again, whenever you save")
    options = parser.parse_args()
    number = options.number.zfill(2) if options.number else first_unsolved()
    if number is None:
        print("All exercises are solved.")
        return 0
    if number not in NAMES:
        parser.error(f"there is no exercise {number!r}: there are {', '.join(NAMES)}")
    if not options.watch:
        return walk(number, options.hint)
    try:
        watch(number, options.hint)
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
