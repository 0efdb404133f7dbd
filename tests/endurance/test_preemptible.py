"""What becomes of the runbook's script to copy when something happens to it: the same bits."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from instruments.batch_job import changed
from instruments.small_disk import SmallDisk

from ..forked import fast_bin

ROOT = Path(__file__).parents[2]
PROGRAM = changed(
    (ROOT / "runs/preemptible.py").read_text(encoding="utf-8"),
    {"= 400, 100, 10": "= 300, 20, 10"},
)
SECONDS = 200

pytestmark = [
    pytest.mark.timeout(3 * SECONDS),
    pytest.mark.skipif(os.name != "posix", reason="the script's lock is Unix's"),
]


class Script:
    """The script, in a folder of its own."""

    def __init__(self, home: Path, program: str = PROGRAM) -> None:
        self.program = home / "preemptible.py"
        self.program.write_text(program, encoding="utf-8")
        self.folder = home / "job"
        self.checkpoint = self.folder / "checkpoint.pt"

    def start(self, restarts: int = 0) -> subprocess.Popen[str]:
        launch = ["torchrun", "--standalone", "--nproc_per_node=2", f"--max_restarts={restarts}"]
        return subprocess.Popen(
            [*launch, str(self.program), str(self.folder)],
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # a restart has a store of its own
                "PATH": f"{fast_bin()}:{os.environ['PATH']}",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, restarts: int = 0) -> tuple[int, str]:
        started = self.start(restarts)
        printed = started.communicate(timeout=SECONDS)[0]
        return started.returncode, printed

    def weights(self) -> torch.Tensor:
        return torch.load(self.checkpoint, weights_only=True)["model"]["weight"]

    def has_saved(self) -> bool:
        return self.checkpoint.exists()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    script = Script(tmp_path_factory.mktemp("undisturbed"))
    assert script.run()[0] == 0
    assert (script.folder / "done").exists()
    return script.weights()


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path)


def goes_on(script: Script, undisturbed: torch.Tensor, restarts: int = 0) -> None:
    code, printed = script.run(restarts)
    assert code == 0, printed
    assert (script.folder / "done").exists()
    assert torch.equal(script.weights(), undisturbed)
    assert not list(script.folder.glob("*.new"))


def until(come: Callable[[], bool], started: subprocess.Popen[str]) -> None:
    while not come():
        assert started.poll() is None, started.communicate()[0]
        time.sleep(0.01)


def test_sigterm_saves_and_the_same_command_goes_on(
    script: Script, undisturbed: torch.Tensor
) -> None:
    started = script.start()
    until(script.folder.exists, started)
    time.sleep(0.2)  # before the first save, where the machine is not busy
    started.send_signal(signal.SIGTERM)
    printed = started.communicate(timeout=SECONDS)[0]
    assert "SignalException" in printed
    step = torch.load(script.checkpoint, weights_only=True)["step"]
    assert f"step {step} of 300" in printed
    goes_on(script, undisturbed)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_launcher_killed_at_any_moment(
    script: Script, undisturbed: torch.Tensor, seed: int
) -> None:
    started = script.start()
    until(script.folder.exists, started)
    time.sleep(random.Random(seed).uniform(0, 2))
    started.kill()
    started.communicate(timeout=SECONDS)
    deadline = time.monotonic() + SECONDS
    while lives(script.program) and time.monotonic() < deadline:
        time.sleep(0.1)
    goes_on(script, undisturbed)


def lives(program: Path) -> bool:
    """Whether a rank of the program still runs."""
    found = subprocess.run(["pgrep", "-f", str(program)], capture_output=True)
    return found.returncode == 0


def test_a_shared_folder_that_shows_one_rank_nothing(
    script: Script, undisturbed: torch.Tensor
) -> None:
    started = script.start()
    until(script.has_saved, started)
    (script.folder / "leave").touch()
    assert started.wait(SECONDS) == 0
    assert not (script.folder / "done").exists()
    (script.folder / "leave").unlink()
    before = script.checkpoint.read_bytes()

    stale = {"if path.exists():": "if path.exists() and dist.get_rank() == 0:"}
    script.program.write_text(changed(PROGRAM, stale), encoding="utf-8")
    code, printed = script.run()
    assert code != 0
    assert "not all ranks see the checkpoint of step" in printed
    assert script.checkpoint.read_bytes() == before
    assert not (script.folder / "done").exists()

    script.program.write_text(PROGRAM, encoding="utf-8")
    goes_on(script, undisturbed)


def test_a_full_disk_is_said_and_costs_no_checkpoint(
    script: Script, undisturbed: torch.Tensor
) -> None:
    script.folder.mkdir()
    with SmallDisk(script.folder) as disk:
        if not disk.is_mounted:
            pytest.skip("no small disk can be mounted here")
        disk.fill(80 * 1024)  # a checkpoint and a half
        code, printed = script.run()
        assert code != 0
        assert "cannot save step 40" in printed
        assert not list(script.folder.glob("*.new"))
        disk.free()
        goes_on(script, undisturbed)


def test_a_second_start_into_the_same_folder_is_refused(tmp_path: Path) -> None:
    script = Script(tmp_path, changed(PROGRAM, {"= 300, 20, 10": f"= {10**6}, 20, 10"}))
    first = script.start()
    until(script.has_saved, first)
    code, printed = script.run()
    assert code != 0
    assert f"another job trains in {script.folder}" in printed
    (script.folder / "leave").touch()
    assert first.wait(SECONDS) == 0


def test_a_rank_that_is_killed_is_started_again(script: Script, undisturbed: torch.Tensor) -> None:
    dies = {"        step += 1\n": "        step += 1\n        die_once(folder, step)\n"}
    die_once = (
        "def die_once(folder, step):\n"
        "    if step == 57 and dist.get_rank() == 1 and not (folder / 'died').exists():\n"
        "        (folder / 'died').touch()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n\n\n"
    )
    script.program.write_text(changed(PROGRAM, {**dies, "def main(": f"{die_once}def main("}))
    goes_on(script, undisturbed, restarts=1)
    assert (script.folder / "died").exists()
