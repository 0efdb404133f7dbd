"""The book's table of what torch and miniddp do, written beside the tests that show it.

A test with the marker `parity` is a row: its section, what it shows (`says`, else its docstring),
what torch and miniddp do, and within which tolerance they were compared. All of them together:

    make parity

which runs these tests and, if every one passes, writes tests/parity.json for the book.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "parity.json"
passed: set[str] = set()


def row(
    section: str,
    tolerance: str | dict[str, float] = "",
    says: str | Callable[..., Any] = "",
    torch: str = "yes",
    miniddp: str = "yes",
) -> pytest.MarkDecorator:
    """The marker of a row. `says` may be the function that is tested: then it is its docstring."""
    if isinstance(tolerance, dict):
        tolerance = ", ".join(f"{name} {short(value)}" for name, value in tolerance.items())
    return pytest.mark.parity(section, tolerance, says, torch, miniddp)


def short(value: float) -> str:
    """0.02, 1e-4, 1.3e-6."""
    if value >= 0.001:
        return f"{value:g}"
    digits, exponent = f"{value:.1e}".split("e")
    return f"{digits.removesuffix('.0')}e{int(exponent)}"


def rows(items: Iterable[pytest.Function]) -> dict[str, list[dict[str, str]]]:
    """The rows by section, in the order of the tests; several tests can make one row."""
    found: dict[str, list[dict[str, str]]] = {}
    for item in items:
        for marker in item.iter_markers("parity"):
            section, tolerance, says, torch, miniddp = marker.args
            shown_by = says if callable(says) else item.function
            behaviour = " ".join(
                (inspect.getdoc(shown_by) if callable(says) or not says else says).split()
            )
            file = Path(inspect.getfile(shown_by)).relative_to(ROOT).as_posix()
            entry = {
                "behaviour": behaviour,
                "torch": torch,
                "miniddp": miniddp,
                "tolerance": tolerance,
                "test": f"{file}::{shown_by.__name__}",
            }
            section_rows = found.setdefault(section, [])
            if entry not in section_rows:
                section_rows.append(entry)
    return found


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--parity", type=Path, metavar="FILE", help="write the table of parity")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
        passed.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    file = session.config.getoption("parity")
    if file is None:
        return
    items = [item for item in session.items if item.get_closest_marker("parity")]
    unproven = [item.nodeid for item in items if item.nodeid not in passed]
    if unproven and not session.config.option.collectonly:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print(f"\n{file} was not written: {len(unproven)} of its tests did not pass")
        return
    import torch

    table = {"torch": torch.__version__.partition("+")[0], "sections": rows(items)}
    file.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
