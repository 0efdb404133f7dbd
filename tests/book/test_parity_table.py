"""tests/parity.json, which the book shows: every row has its test, and every test its row."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..parity import ROOT, TABLE, short

OF_MAKE_PARITY = ["package", "finetune", "instruments"]


def test_the_table_is_that_of_the_tests(tmp_path: Path) -> None:
    described = tmp_path / "parity.json"
    others = sorted(set(ROOT.glob("tests/**/test_*.py")) - {Path(__file__)})
    files = [path for path in others if "row(" in path.read_text()]
    files.sort(key=lambda path: OF_MAKE_PARITY.index(path.relative_to(ROOT / "tests").parts[0]))
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "parity", *files]
    command += [f"--parity={described}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stdout
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    expected = json.loads(described.read_text(encoding="utf-8"))["sections"]
    assert table["sections"] == expected, "write it again: make parity"


def test_the_table_was_made_with_the_pinned_torch() -> None:
    pinned = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    assert table["torch"] == pinned[1], "write it again: make parity"


def test_the_page_shows_every_section() -> None:
    page = (ROOT / "appendix/parity.qmd").read_text(encoding="utf-8")
    shown = re.findall(r'\{\.parity (?:\.counted )?section="([^"]+)"\}', page)
    sections = json.loads(TABLE.read_text(encoding="utf-8"))["sections"]
    assert sorted(shown) == sorted(sections)


@pytest.mark.parametrize("passes", [True, False])
def test_a_row_needs_a_test_that_passes(tmp_path: Path, passes: bool) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    for name in ("__init__.py", "parity.py"):
        (folder / name).write_text((ROOT / "tests" / name).read_text(encoding="utf-8"))
    (folder / "conftest.py").write_text("from .parity import *\n")
    (folder / "test_it.py").write_text(
        "from .parity import row\n\n"
        "@row('hooks', {'rtol': 1e-4}, torch='sends')\n"
        f"def test_it():\n    '''Something\n    is sent.'''\n    assert {passes}\n"
    )
    table = tmp_path / "table.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [f"--parity={table}", "--rootdir", str(tmp_path), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    if not passes:
        assert done.returncode == 1
        assert f"{table} was not written: 1 of its tests did not pass" in done.stdout
        assert not table.exists()
        return
    assert done.returncode == 0, done.stdout
    assert json.loads(table.read_text())["sections"] == {
        "hooks": [
            {
                "behaviour": "Something is sent.",
                "torch": "sends",
                "miniddp": "yes",
                "tolerance": "rtol 1e-4",
                "test": "tests/test_it.py::test_it",
            }
        ]
    }


@pytest.mark.parametrize(
    ("value", "text"), [(0.02, "0.02"), (1e-4, "1e-4"), (1.3e-6, "1.3e-6"), (1e-12, "1e-12")]
)
def test_tolerances_are_short(value: float, text: str) -> None:
    assert short(value) == text
