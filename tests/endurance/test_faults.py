"""The matrix of faults, in short: one of each."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import faults
from instruments import trials
from instruments.launched_jobs import SAVES, STEPS, NotSurvived, Process, digest, file

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(sys.platform != "linux", reason="the timers of the faults are Linux's")
@pytest.mark.timeout(900)  # a minute where nothing else runs
def test_a_training_survives_one_of_each_fault(tmp_path):
    found = tmp_path / "found.json"
    command = [sys.executable, ROOT / "runs/faults.py", "--repeat=1", f"--json={found}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    rows = json.loads(found.read_text())["rows"]
    assert all(row["injected"] == row["survived"] == 1 for row in rows)
    assert {row["program"] for row in rows} == {"trainer", "script"}
    assert not any(row["orphans"] or row["left_over"] for row in rows)
    last = done.stdout.splitlines()[-1]
    assert re.fullmatch(rf"faults: {len(rows)} injected, {len(rows)} survived, 0 lost", last)


@pytest.fixture
def finished(tmp_path):
    """A training that has survived, as its files and its process tell."""
    reference = SimpleNamespace(data=tmp_path, digests={}, evaluation={"simple": "evaluation: 1"})
    trial = trials.Trial("a loss is not a number", "0", tmp_path / "job", reference, cold=False)
    for step in (SAVES[-2], STEPS):
        (trial.saved / file(step)).write_text(str(step))
    reference.digests["simple"] = digest(trial.saved / file(STEPS))
    return trial, SimpleNamespace(code=0, text="", last_line="evaluation: 1")


def test_survived(finished):
    trial, process = finished
    trial.finished(process)


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda _, process: setattr(process, "code", 1), "exit code 1"),
        (lambda _, process: setattr(process, "last_line", "x"), "'x', not 'evaluation: 1'"),
        (lambda trial, _: (trial.saved / "a.unfinished").touch(), "left over"),
        (
            lambda trial, _: (trial.saved / file(STEPS)).write_text("other"),
            "the last checkpoint is another",
        ),
    ],
)
def test_not_survived(finished, spoil, expected):
    spoil(*finished)
    trial, process = finished
    with pytest.raises(NotSurvived, match=expected):
        trial.finished(process)


def test_what_is_lost_is_said_and_is_the_exit_code(monkeypatch, capsys):
    outcomes = [
        trials.Outcome("the disk is full", "7-0"),
        trials.Outcome("the disk is full", "7-1"),
    ]
    outcomes[1].problem = "all is gone"
    monkeypatch.setattr(faults, "matrix", lambda *_: iter(outcomes))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    forks = Process.context  # shared with all tests of this process
    monkeypatch.setattr(forks, "set_forkserver_preload", lambda modules: None)
    monkeypatch.setattr(sys, "argv", ["faults.py", "--seed=7", "--program=script"])
    assert faults.main() == 1
    first, lost, row, last = capsys.readouterr().out.splitlines()
    assert first == "seed 7"
    assert lost == "LOST: the disk is full (seed 7-1): all is gone"
    assert row.split()[:3] == ["1", "of", "2"]
    assert last == "faults: 2 injected, 1 survived, 1 lost"
