"""The long training, in short; and what it would say of one that grows."""

import os
import sys

import pytest

import soak

from ..package.ranks import start_server


@pytest.mark.skipif(sys.platform != "linux", reason="memory, files and threads are read from /proc")
@pytest.mark.timeout(900)  # half a minute where nothing else runs
def test_some_hundred_steps_are_flat_and_a_resume_equals_them(monkeypatch, capsys):
    start_server()  # its forks are the trainings
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "argv", ["soak.py", "--steps=300"])
    code, said = soak.main(), capsys.readouterr().out
    assert code == 0, said
    assert said.splitlines()[-1] == "soak: 300 steps, flat, resumed and equal"


def used(*megabytes: float) -> list[list[list[soak.Sample]]]:
    """Intervals in which rank 1 uses so much, and rank 0 always the same."""
    return [[[{"MB": 100.0, "files": 9.0}], [{"MB": size, "files": 9.0}]] for size in megabytes]


def test_growth_is_that_of_the_rank_that_grows_most():
    points = soak.curve(used(1, *[100, 100, 110, 110, 120, 120, 130, 130], 1))
    assert len(points) == 8
    assert soak.growth(points) == {"MB": 130 / 110, "files": 1.0}


def test_an_interval_without_a_sample_is_left_out():
    assert len(soak.curve([*used(1, 2), [[], []], *used(3, 4)])) == 2
