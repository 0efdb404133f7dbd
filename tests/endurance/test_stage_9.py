"""What becomes of the last stage when something happens to it: the same bits, or one line."""

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils import _pytree as pytree

from instruments.small_disk import SmallDisk

from ..forked import fast_bin

STAGE = Path(__file__).parents[2] / "stages/9_train.py"
SECONDS = 300
STEPS = 60
WITH_WORKERS = ("--workers", "1")
TASK = '''
"""Stands in for the text and the model: it draws in the loader and in forward, and has faults."""

import faulthandler
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

faulthandler.dump_traceback_later(200)  # where a rank stands that is about to be given up
FAULT = os.environ.get("FAULT")
RANK = os.environ["RANK"]
Path(__file__).with_name(f"process-of-{RANK}").write_text(str(os.getpid()))
if FAULT == "options" and RANK == "1":
    sys.argv += ["--seed", "3"]
if FAULT == "stale" and RANK == "1":
    Path.glob = lambda *_: iter([])


class Sequences(torch.utils.data.Dataset):
    def __len__(self):
        return 0 if FAULT == "data" else 50

    def __getitem__(self, index):
        return torch.randint(9, (5,)) + index


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 16 + (FAULT == "model"))
        self.dropout = nn.Dropout(0.2)
        self.steps = 0

    def forward(self, input_ids, labels):
        time.sleep(0.02)
        self.steps += self.training
        weight = torch.nan if FAULT == "nan" and self.steps == 13 and RANK == "1" else 1.0
        found = self.dropout(self.embedding(input_ids)).square().mean()
        return SimpleNamespace(loss=found * weight)


def load_text():
    return Sequences(), torch.arange(35).view(7, 5)


build_language_model = Model
'''

pytestmark = pytest.mark.timeout(3 * SECONDS)


class Training:
    """The stage, beside the task, in a folder of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.program = home / STAGE.name
        self.program.write_text(STAGE.read_text(encoding="utf-8"), encoding="utf-8")
        (home / "shakespeare.py").write_text(TASK, encoding="utf-8")
        self.folder = home / "checkpoints"

    def start(self, *options: str, restarts: int = 0, fault: str = "") -> subprocess.Popen[str]:
        launch = ["torchrun", "--standalone", "--nproc_per_node=2", f"--max_restarts={restarts}"]
        job = [f"--steps={STEPS}", "--every=10", "--batch=12", f"--checkpoints={self.folder}"]
        return subprocess.Popen(
            [*launch, str(self.program), *job, *options],
            env={
                **os.environ,
                "FAULT": fault,
                "OMP_NUM_THREADS": "1",
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # a restart has a store of its own
                "PATH": f"{fast_bin()}:{os.environ['PATH']}",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *options: str, restarts: int = 0, fault: str = "") -> tuple[int, str]:
        started = self.start(*options, restarts=restarts, fault=fault)
        printed = started.communicate(timeout=SECONDS)[0]
        return started.returncode, printed

    def saved(self) -> list[Path]:
        return sorted(self.folder.glob("step-*.pt"))

    def steps_saved(self) -> list[int]:
        return [int(path.name.split("-")[1]) for path in self.saved()]

    def process_of(self, rank: int) -> Path:
        return self.home / f"process-of-{rank}"

    def is_refused(self, *options: str, line: str, fault: str = "") -> None:
        """With this line, once; and what was saved stays as it is."""
        before = self.saved()
        code, printed = self.run(*options, fault=fault)
        errors = re.findall("^error: .*", printed, re.MULTILINE)
        assert code != 0
        assert len(errors) == 1, printed
        assert line in errors[0]
        assert printed.count("Traceback") == 1, printed  # torchrun's own
        assert set(before) <= set(self.saved())


def state_at_the_end(training: Training) -> dict[str, object]:
    state = torch.load(training.saved()[-1], weights_only=True)
    assert state["step"] == STEPS
    return {pytree.keystr(path): value for path, value in pytree.tree_leaves_with_path(state)}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    training = Training(tmp_path_factory.mktemp("undisturbed"))
    code, printed = training.run(*WITH_WORKERS)
    assert code == 0, printed
    return state_at_the_end(training)


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path)


def ends_as(undisturbed: dict[str, object], training: Training) -> None:
    found = state_at_the_end(training)
    assert found.keys() == undisturbed.keys()
    for name, value in undisturbed.items():
        equal = torch.equal(value, found[name]) if torch.is_tensor(value) else value == found[name]
        assert equal, name
    assert training.steps_saved() == [STEPS - 10, STEPS]
    assert not list(training.folder.glob("unfinished-*"))


def goes_on(undisturbed: dict[str, object], training: Training) -> str:
    code, printed = training.run(*WITH_WORKERS)
    assert code == 0, printed
    ends_as(undisturbed, training)
    return printed


def until(come: Callable[[], object], started: subprocess.Popen[str]) -> None:
    while not come():
        assert started.poll() is None, started.communicate()[0]
        time.sleep(0.01)


def test_sigterm_saves_and_the_same_command_goes_on(training, undisturbed) -> None:
    started = training.start(*WITH_WORKERS)
    until(training.saved, started)
    started.send_signal(signal.SIGTERM)
    printed = started.communicate(timeout=SECONDS)[0]
    step = training.steps_saved()[-1]
    assert step < STEPS
    assert f"ends after step {step} of {STEPS}" in printed
    assert f"starts after step {step}\n" in goes_on(undisturbed, training)


@pytest.mark.parametrize("seed", range(3))
def test_a_rank_killed_at_any_moment_is_started_again(training, undisturbed, seed) -> None:
    chance = random.Random(seed)
    rank = chance.randrange(2)
    started = training.start(*WITH_WORKERS, restarts=1)
    until(training.process_of(rank).exists, started)
    time.sleep(chance.uniform(0, 3))
    os.kill(int(training.process_of(rank).read_text()), signal.SIGKILL)
    printed = started.communicate(timeout=SECONDS)[0]
    assert started.returncode == 0, printed
    ends_as(undisturbed, training)


def test_a_launcher_killed_at_any_moment(training, undisturbed) -> None:
    started = training.start(*WITH_WORKERS)
    until(training.process_of(0).exists, started)
    time.sleep(random.uniform(0, 2))
    started.kill()
    started.communicate(timeout=SECONDS)
    for rank in range(2):
        while is_alive(int(training.process_of(rank).read_text())):
            time.sleep(0.1)
    goes_on(undisturbed, training)


def is_alive(process: int) -> bool:
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rpartition(") ")[2][0] != "Z"


def test_a_damaged_checkpoint_is_passed_over_unless_no_other_is_there(
    training, undisturbed
) -> None:
    assert training.run(*WITH_WORKERS, "--steps=30")[0] == 0
    middle, last = training.saved()
    damage(last)
    printed = goes_on(undisturbed, training)
    assert f"skipped {last}: it is damaged" in printed
    assert "starts after step 20\n" in printed
    assert not middle.exists()
    for path in training.saved():
        damage(path)
    training.is_refused(line=f"rank 0, newest: no checkpoint in {training.folder} is whole")


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[random.randrange(len(content))] ^= 4
    path.write_bytes(content)


def test_what_cannot_go_on_is_refused_in_a_line_and_goes_on_when_mended(
    training, undisturbed
) -> None:
    training.is_refused("--batch=7", line="rank 0, parse_arguments: --batch must be a multiple")
    training.is_refused("--stesp=7", line="rank 0, parse_arguments: unrecognized arguments")
    training.is_refused("--steps=-3", line="rank 0, parse_arguments: --steps, --accumulation and")
    training.is_refused("--clip=-1", line="rank 0, parse_arguments: --learning-rate, --warmup")
    training.is_refused(fault="data", line="rank 0, build_loader: 0 sequences fill no global")
    training.is_refused(fault="options", line="rank 1 has Namespace(")
    assert training.saved() == []

    training.is_refused(*WITH_WORKERS, fault="nan", line="at step 20: the loss or a weight is not")
    assert training.steps_saved() == [10]
    path = training.saved()[0]
    training.is_refused("--batch=24", line=f"rank 0, load: {path} was saved with --batch 12")
    training.is_refused(fault="model", line="rank 0, load: Error(s) in loading state_dict")
    training.is_refused(fault="stale", line=f"rank 1 has None, but rank 0 has {path}")
    goes_on(undisturbed, training)


def test_a_full_disk_is_said_and_costs_no_checkpoint(training, undisturbed) -> None:
    training.folder.mkdir()
    with SmallDisk(training.folder) as disk:
        if not disk.is_mounted:
            pytest.skip("no small disk can be mounted here")
        disk.fill(28 * 1024)  # a checkpoint and a half
        training.is_refused(*WITH_WORKERS, line="rank 0, save: ")
        assert training.steps_saved() == [10]
        assert not list(training.folder.glob("unfinished-*"))
        disk.free()
        goes_on(undisturbed, training)
