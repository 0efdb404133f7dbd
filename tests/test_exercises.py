"""Every exercise can be failed and can be solved."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXERCISES = sorted(path.stem for path in (ROOT / "exercises").glob("[0-9][0-9]_*.py"))


def run(name: str, folder: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", f"exercises/test_{name}.py"],
        cwd=ROOT,
        env={**os.environ, "EXERCISE_DIR": folder},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_there_are_exercises() -> None:
    assert EXERCISES


@pytest.mark.parametrize("name", EXERCISES)
def test_the_skeleton_fails(name: str) -> None:
    result = run(name, "exercises")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "NotImplementedError" in result.stdout


@pytest.mark.parametrize("name", EXERCISES)
def test_the_solution_passes(name: str) -> None:
    result = run(name, "exercises/solutions")
    assert result.returncode == 0, result.stdout + result.stderr
