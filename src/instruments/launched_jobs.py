"""Trainings with `finetune` under torchrun, each in a folder of its own, to be disturbed."""

import contextlib
import hashlib
import json
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from instruments import warm_start

STEPS = 14
SAVES = [4, 8, 12, 14]
OPTIONS = [
    "--model=tiny",
    "--epochs=2",
    f"--steps={STEPS}",
    "--batch-size=4",
    "--max-length=8",
]
OPTIONS += [f"--checkpoint-every={SAVES[0]}", "--resume=auto"]
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else a restart may meet the dead
}
HANGS = 240.0  # seconds after which a job is given up; none takes a tenth on a quiet machine
PROGRAM = Path(__file__).parents[2] / "runs/faulty.py"


class NotSurvived(AssertionError):  # noqa: N818
    """What was lost, and how."""


def need(condition: object, problem: str) -> None:
    if not condition:
        raise NotSurvived(problem)


def wait_for(condition: Callable[[], object], problem: str) -> None:
    end = time.monotonic() + HANGS
    while not condition():
        need(time.monotonic() < end, problem)
        time.sleep(0.01)


def file(step: int) -> str:
    return f"step-{step:08d}.safetensors"


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def ranks(launcher: int) -> list[int]:
    """The processes that torchrun has started, in the order of their ranks."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children")
    return sorted(map(int, children.read_text().split())) if children.exists() else []


def is_running(pid: int) -> bool:
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        )
    except FileNotFoundError:
        return False


class Process:
    """A torchrun that has been started, with a warm start or from scratch."""

    context = multiprocessing.get_context("forkserver")
    lock = threading.Lock()  # one thread at a time may ask for an exit code

    def __init__(
        self, arguments: Sequence[str], environment: dict[str, str], output: Path
    ) -> None:
        self.output = output
        self.started = time.time()
        self.ended: float | None = None
        is_warm = not environment.get("FAULTS_COLD")
        launch = (arguments, environment, output, is_warm)
        self.process = self.context.Process(target=warm_start.launch, args=launch)
        with self.lock:
            self.process.start()

    @property
    def code(self) -> int | None:
        with self.lock:
            return self.process.exitcode

    def send(self, number: int) -> float:
        """Send a signal; the time at which it was sent."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, number)
        return time.time()

    def wait(self) -> int:
        wait_for(lambda: self.code is not None, f"{self.text[-2000:]}\nstill runs")
        self.ended = time.time()
        return self.code or 0

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    @property
    def last_line(self) -> str:
        return [line for line in self.text.splitlines() if line.strip(" =")][-1]


class Job:
    """A folder of its own for a training, what its processes noted, and what they left."""

    def __init__(self, home: Path, data: Path, seed: str, cold: bool = False) -> None:
        self.home = home
        self.data = data
        self.cold = cold
        self.random = random.Random(seed)
        self.saved = home / "saved"
        self.saved.mkdir(parents=True)
        (home / "tmp").mkdir()
        self.struck: float | None = None
        self.processes: list[Process] = []

    def start(
        self,
        *options: str,
        fault: dict[str, Any] | None = None,
        restarts: int = 0,
        ranks: int = 2,
    ) -> Process:
        """Start the training; `options` come last."""
        environment = {
            **os.environ,
            "TMPDIR": str(self.home / "tmp"),
            "FAULTS_HOME": str(self.home),
            "FAULTS_COLD": "1" if self.cold else "",
            "FAULT": json.dumps(fault),
        }
        launch = [
            "--standalone",
            f"--nproc_per_node={ranks}",
            f"--max_restarts={restarts}",
        ]
        output = self.home / f"output-{len(self.processes)}"
        process = Process([*launch, *self.program(), *options], environment, output)
        self.processes.append(process)
        return process

    def program(self) -> list[str]:
        """What torchrun starts."""
        folders = [f"--data-dir={self.data}", f"--checkpoint={self.saved}"]
        return [str(PROGRAM), *OPTIONS, *folders]

    def run(self, *options: str, **chosen: Any) -> Process:
        process = self.start(*options, **chosen)
        process.wait()
        return process

    def notes(self, what: str) -> list[dict[str, Any]]:
        file = self.home / "notes"
        lines = file.read_text().splitlines() if file.exists() else []
        return [note for note in map(json.loads, lines) if note["what"] == what]

    def note_steps(self, last: int) -> None:
        """Who made the checkpoints of this folder has taken the steps up to the last one's."""
        with (self.home / "notes").open("a") as notes:
            for step in range(1, last + 1):
                notes.write(
                    json.dumps({"what": "step", "rank": 0, "step": step}) + "\n"
                )

    def reach(self, step: int) -> None:
        """Wait until rank 0 has taken this step, and a random moment longer."""
        wait_for(
            lambda: (
                any(note["step"] >= step for note in self.notes("step"))
                or self.has_ended
            ),
            f"step {step} is not reached",
        )
        time.sleep(self.random.random() * 0.05)

    @property
    def has_ended(self) -> bool:
        return self.processes[-1].code is not None

    def files(self) -> set[str]:
        """What is there, apart from the hidden lock."""
        return {path.name for path in self.saved.glob("[!.]*")}

    def orphans(self) -> int:
        """Ranks that go on when all launchers have ended; they are then killed."""
        pids = {note["pid"] for note in self.notes("start")}
        end = time.monotonic() + 10
        while time.monotonic() < end and any(map(is_running, pids)):
            time.sleep(0.01)
        left = [pid for pid in pids if is_running(pid)]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(left)

    def end(self) -> None:
        for process in self.processes:
            if process.code is None:
                process.send(signal.SIGKILL)
        self.orphans()
