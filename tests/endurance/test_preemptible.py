"""A near-miss of the script to copy does not survive: test_faults tries the script itself."""

import re
import sys
from pathlib import Path

import pytest

from instruments import copied_script, warm_start
from instruments.launched_jobs import ENVIRONMENT, Process
from instruments.trials import attempt

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the launcher's death is told by Linux"),
    pytest.mark.timeout(900),  # half a minute where nothing else runs
]
NEAR_MISSES = {
    "one rank sees no checkpoint": (
        'if largest(state["step"], device) != -largest(-state["step"], device):',
        "if False:",
        "nothing says not all ranks see",
    ),
    "the disk is full": (
        "except (OSError, RuntimeError) as error:",
        "except BlockingIOError as error:",
        "nothing says cannot save step",
    ),
    "a second start into the same folder": (
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_UN",
        "nobody is refused|steps were done twice",
    ),
    "SIGTERM to torchrun, at any moment": (
        "if leaving or step % SAVE_EVERY == 0:",
        "if step % SAVE_EVERY == 0 and not leaving:",
        "not all steps were saved",
    ),
    "SIGKILL to torchrun, at any moment": (
        'if sys.platform == "linux":',
        "if False:",
        "the ranks have trained to the end",
    ),
}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    Process.context.set_forkserver_preload([warm_start.__name__])
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def until_saved(trial: copied_script.ScriptTrial) -> Process:
    process = trial.job.start()
    trial.job.until_saved()
    return process


@pytest.mark.parametrize("kind", NEAR_MISSES)
def test_a_near_miss_is_found(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed = copied_script.Undisturbed(tmp_path)
    right, nearly, problem = NEAR_MISSES[kind]
    monkeypatch.setattr(copied_script, "SIZES", {**copied_script.SIZES, right: nearly})
    monkeypatch.setattr(copied_script.ScriptTrial, "start_and_wait", until_saved)
    trial = undisturbed.trial(kind, "5", tmp_path / "trial", cold=False)
    outcome = attempt(trial, copied_script.KINDS[kind].trial)
    assert re.search(problem, outcome.problem)
