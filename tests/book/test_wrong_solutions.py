"""The mistakes that learners make fail the exercise's tests, with a message that leads to them."""

import tomllib
from pathlib import Path

import pytest

from .test_exercises import EXERCISES, solution, walk

FILE = Path(__file__).with_name("wrong_solutions.toml")
MISTAKES = tomllib.loads(FILE.read_text(encoding="utf-8"))


def test_each_exercise_has_five() -> None:
    assert list(MISTAKES) == EXERCISES
    assert min(map(len, MISTAKES.values())) >= 5


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        pytest.param(name, wrong, id=f"{name[:2]}: {wrong['mistake']}")
        for name, wrongs in MISTAKES.items()
        for wrong in wrongs
    ],
)
def test_the_mistake_is_named(name: str, wrong: dict[str, str], tmp_path: Path) -> None:
    solution(tmp_path, name, wrong["right"], wrong["wrong"])
    result = walk(name[:2], tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    assert wrong["says"] in result.stdout
