"""Every exercise can be failed and can be solved."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from ..forked import fast_bin

ROOT = Path(__file__).parents[2]
EXERCISES = sorted(path.stem for path in (ROOT / "exercises").glob("[0-9][0-9]_*.py"))


def walk(number: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [fast_bin() / "python", "exercises/walk.py", number, *options],
        cwd=ROOT,
        env={**os.environ, "EXERCISE_DIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_there_are_exercises() -> None:
    assert EXERCISES


def is_begun(name: str) -> bool:
    """Whether somebody solves the exercise here: it is not as it was committed, or all done."""
    file = f"exercises/{name}.py"
    changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", file], cwd=ROOT)
    text = (ROOT / file).read_text(encoding="utf-8")
    return changed.returncode == 1 or "raise NotImplementedError" not in text


@pytest.mark.parametrize("name", EXERCISES)
def test_the_skeleton_fails_at_its_first_step(name: str) -> None:
    if is_begun(name):
        pytest.skip(f"exercises/{name}.py is being solved here")
    result = walk(name[:2], ROOT / "exercises", "--hint")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "Step 1 of" in result.stdout
    assert "NotImplementedError" in result.stdout
    assert "Hint: " in result.stdout
    assert len(result.stdout.splitlines()) < 12


@pytest.mark.parametrize("name", EXERCISES)
def test_the_solution_passes(name: str) -> None:
    result = walk(name[:2], ROOT / "exercises/solutions")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "steps hold." in result.stdout


@pytest.mark.parametrize("name", EXERCISES)
def test_each_step_has_a_hint(name: str) -> None:
    hints = tomllib.loads((ROOT / "exercises/hints.toml").read_text(encoding="utf-8"))
    tests = (ROOT / f"exercises/test_{name}.py").read_text(encoding="utf-8")
    assert list(hints[name[:2]]) == re.findall(r"^def test_(\w+)", tests, re.MULTILINE)


def solution(folder: Path, name: str, right: str, wrong: str) -> None:
    text = (ROOT / f"exercises/solutions/{name}.py").read_text(encoding="utf-8")
    assert right in text
    (folder / f"{name}.py").write_text(text.replace(right, wrong), encoding="utf-8")


def test_a_wrong_value_is_shown_beside_the_right_one(tmp_path: Path) -> None:
    solution(
        tmp_path, "05_ring", "(rank - s) % size, (rank - s - 1)", "(rank - s) % size, (rank - s)"
    )
    result = walk("05", tmp_path)
    assert result.returncode == 1
    step = "Step 3 of 5: in all gather a rank receives what its left neighbour sends"
    assert step in result.stdout
    assert "size=2" in result.stdout
    assert "expected [1]\n    came     [0]" in result.stdout


def test_a_later_step_comes_when_the_earlier_ones_hold(tmp_path: Path) -> None:
    solution(tmp_path, "01_averaging", "if total == 0:", "if total < 0:")
    result = walk("01", tmp_path)
    assert "Step 4 of 5: no samples at all" in result.stdout
    assert "in joined_gradients, 01_averaging.py line" in result.stdout


def test_what_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "01_averaging.py").write_text("def joined_gradients(:", encoding="utf-8")
    result = walk("01", tmp_path)
    assert result.returncode == 1
    assert "It cannot be imported." in result.stdout
    assert "SyntaxError" in result.stdout


def test_a_number_needs_no_nought() -> None:
    result = walk("5", ROOT / "exercises/solutions")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "All 5 steps hold." in result.stdout


def test_an_unknown_exercise() -> None:
    result = walk("99", ROOT / "exercises")
    assert result.returncode == 2
    assert "there is no exercise '99'" in result.stderr.splitlines()[-1]
