"""A near-miss of the script to copy does not survive: test_faults tries the script itself."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import preemptible
from instruments import copied_script, warm_start
from instruments.launched_jobs import ENVIRONMENT, Process, is_running, ranks, wait_for
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
        "if leaving or step % SAVE_EVERY == 0 or step == STEPS:",
        "if step % SAVE_EVERY == 0 and not leaving:",
        "not all steps were saved|The failure occurred for item",
    ),
    "SIGKILL to torchrun, at any moment": (
        'if __name__ == "__main__" and sys.platform == "linux":',
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


def test_the_last_step_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copied_script, "SIZES", {"= 400, 100, 10": "= 30, 20, 10"})
    job = copied_script.ScriptJob(tmp_path, "short")
    process = job.run()
    assert process.code == 0, process.text
    assert job.state()["step"] == 30


def imports_torch(pid: int) -> bool:
    return "libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text()


def test_ranks_that_still_import_torch_end_with_the_launcher(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    launcher = subprocess.Popen([*command, copied_script.SCRIPT, tmp_path / "job"])
    wait_for(lambda: len(ranks(launcher.pid)) == 2, "torchrun starts no ranks")
    started = ranks(launcher.pid)
    wait_for(lambda: all(map(imports_torch, started)), "a rank does not import torch")
    launcher.kill()
    launcher.wait()
    try:
        wait_for(lambda: not any(map(is_running, started)), "ranks go on without torchrun")
    finally:
        for pid in filter(is_running, started):
            os.kill(pid, signal.SIGKILL)


def test_help_is_no_folder(tmp_path: Path) -> None:
    command = [sys.executable, preemptible.__file__, "--help"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert "folder" in ended.stdout
    assert not list(tmp_path.iterdir())


LEAVES_A_CHILD = """
import os, sys, time
from pathlib import Path
import preemptible
assert preemptible.claim(Path(sys.argv[1])) is None
child = os.fork()
if child == 0:
    os.close(1)
    time.sleep(600)
print(child, flush=True)
os._exit(0)
"""


def test_a_worker_that_outlives_its_rank_does_not_hold_the_lock(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LEAVES_A_CHILD, str(tmp_path)]
    folder = Path(preemptible.__file__).parent
    ended = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, timeout=300)
    child = int(ended.stdout)
    try:
        assert preemptible.claim(tmp_path) is None
    finally:
        os.kill(child, signal.SIGKILL)
