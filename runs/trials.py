"""What the faults of `faults.py` have in common: a job, what is checked of it, and what it cost.

A trial is a training of two ranks with one fault. `matrix` makes them, `rows` counts them.
"""

import contextlib
import hashlib
import json
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import statistics
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import warm
from finetune.data import FILES, SAMPLE

PAIRS = 60  # of the sample: an epoch has seven steps of 2 x 4 pairs
STEPS = 14
SAVES = [4, 8, 12, 14]
DDPS = ("simple", "miniddp", "torch")
OPTIONS = ["--model=tiny", "--epochs=2", f"--steps={STEPS}", "--batch-size=4", "--max-length=8"]
OPTIONS += [f"--checkpoint-every={SAVES[0]}", "--resume=auto"]
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else a restart may meet the dead
}
HANGS = 240.0  # seconds after which a job is given up; none takes a tenth on a quiet machine
WAITING = 10  # trainings at once that wait for a timeout
ROOT = Path(__file__).parent.parent


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


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Process:
    """A torchrun that has been started, with a warm start or from scratch."""

    context = multiprocessing.get_context("forkserver")
    lock = threading.Lock()  # one thread at a time may ask for an exit code

    def __init__(self, arguments: Sequence[str], environment: dict[str, str], output: Path) -> None:
        self.output = output
        self.started = time.time()
        self.ended: float | None = None
        is_warm = not environment.get("FAULTS_COLD")
        launch = (arguments, environment, output, is_warm)
        self.process = self.context.Process(target=warm.launch, args=launch)
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
        self, *options: str, fault: dict[str, Any] | None = None, restarts: int = 0, ranks: int = 2
    ) -> Process:
        """Start the training; `options` come last."""
        environment = {
            **os.environ,
            "TMPDIR": str(self.home / "tmp"),
            "FAULTS_HOME": str(self.home),
            "FAULTS_COLD": "1" if self.cold else "",
            "FAULT": json.dumps(fault),
        }
        launch = ["--standalone", f"--nproc_per_node={ranks}", f"--max_restarts={restarts}"]
        program = [str(ROOT / "runs/faulty.py"), *OPTIONS]
        program += [f"--data-dir={self.data}", f"--checkpoint={self.saved}"]
        output = self.home / f"output-{len(self.processes)}"
        process = Process([*launch, *program, *options], environment, output)
        self.processes.append(process)
        return process

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
                notes.write(json.dumps({"what": "step", "rank": 0, "step": step}) + "\n")

    def reach(self, step: int) -> None:
        """Wait until rank 0 has taken this step, and a random moment longer."""
        wait_for(
            lambda: any(note["step"] >= step for note in self.notes("step")) or self.has_ended,
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


@dataclass
class Reference:
    """Trainings that nothing disturbs: what all others must end with."""

    home: Path
    data: Path
    seconds: dict[str, float] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    evaluation: dict[str, str] = field(default_factory=dict)

    def train(self) -> None:
        for ddp in DDPS:
            job = Job(self.home / ddp, self.data, ddp)
            process = job.run(f"--ddp={ddp}", "--keep=9")
            need(process.code == 0, f"without a fault:\n{process.text}")
            self.digests[ddp] = digest(job.saved / file(STEPS))
            self.evaluation[ddp] = process.last_line
            for phase, seconds in job.notes("end")[0]["seconds"].items():
                self.seconds[phase] = statistics.median(seconds)
        alone = Job(self.home / "alone", self.data, "alone").run("--steps=8", ranks=1)
        other = Job(self.home / "other", self.data, "other").run("--model=5m", "--steps=1")
        for process in (alone, other):
            need(process.code == 0, process.text)

    def checkpoint(self, step: int, of: str = "simple") -> Path:
        """Of a training with one of `DDPS`, or of "alone" or "other"."""
        return self.home / of / "saved" / file(step)


def first_pairs(folder: Path) -> Path:
    """So short an epoch that a training sees two."""
    folder.mkdir()
    text = "".join(SAMPLE.read_text("utf-8").splitlines(keepends=True)[: PAIRS + 1])
    for name in FILES.values():
        (folder / name).write_text(text, "utf-8")
    return folder


# Trials


@dataclass
class Outcome:
    """One fault, and what became of the training."""

    kind: str
    seed: str
    problem: str = ""
    steps_again: int = 0
    seconds_until_noticed: float | None = None
    orphans: int = 0
    left_over: int = 0


class Trial:
    """A job, the reference, and what is checked of every fault."""

    def __init__(self, kind: str, seed: str, home: Path, reference: Reference, cold: bool) -> None:
        self.outcome = Outcome(kind, seed)
        self.job = Job(home, reference.data, f"{kind} {seed}", cold)
        self.reference = reference
        self.ddp = "simple"
        self.random = self.job.random
        self.saved = self.job.saved

    def run(self, *options: str, **chosen: Any) -> Process:
        return self.job.run(f"--ddp={self.ddp}", *options, **chosen)

    def start(self, *options: str, **chosen: Any) -> Process:
        return self.job.start(f"--ddp={self.ddp}", *options, **chosen)

    def any_rank(self) -> int:
        return self.random.randrange(2)

    def any_step(self, first: int = 1, last: int = STEPS - 1) -> int:
        return self.random.randint(first, last)

    def copy_checkpoints(self, *steps: int) -> None:
        """As if a training without a fault had come to the last of these steps."""
        for step in steps:
            shutil.copy(self.reference.checkpoint(step), self.saved)
        self.job.note_steps(max(steps))

    def finished(self, process: Process) -> None:
        """The training is at its end, and nothing is missing or too much."""
        need(process.code == 0, f"exit code {process.code}:\n{process.text[-3000:]}")
        expected = self.reference.evaluation[self.ddp]
        need(process.last_line == expected, f"{process.last_line!r}, not {expected!r}")
        same = digest(self.saved / file(STEPS)) == self.reference.digests[self.ddp]
        need(same, "the last checkpoint is another than without the fault")
        self.outcome.left_over = len(self.job.files() - {file(12), file(STEPS)})
        need(not self.outcome.left_over, f"left over: {self.job.files()}")

    def refused(self, process: Process, *words: str) -> None:
        """One line says why, as the last of the screen and only there."""
        lines = [x for x in process.text.splitlines() if all(word in x for word in words)]
        need(process.code == 1, f"exit code {process.code}:\n{process.text[-3000:]}")
        need(lines, f"nothing says {words}:\n{process.text[-3000:]}")
        need(process.last_line == lines[-1], f"not the last line: {process.text[-1000:]}")
        frames = re.search(r'(finetune|miniddp)/\S+\.py", line', process.text)
        need(not frames, f"a traceback of the program: {process.text[-3000:]}")

    def mended(self) -> None:
        """The same command, when what was wrong no longer is."""
        self.finished(self.run())

    def has_only(self, *steps: int) -> None:
        names = self.job.files()
        need(names == set(map(file, steps)), f"in the folder are {sorted(names)}")

    def settle(self) -> None:
        """Count what the fault cost and left."""
        steps = [note for note in self.job.notes("step") if note["rank"] == 0]
        self.outcome.steps_again = max(0, len(steps) - STEPS)
        faults = [note["time"] for note in self.job.notes("fault")]
        struck = self.job.struck or (faults[0] if faults else math.inf)
        starts = [note["time"] for note in self.job.notes("start")]
        ends = [process.ended for process in self.job.processes if process.ended]
        after = [moment for moment in (*starts, *ends) if moment > struck]
        if after:
            self.outcome.seconds_until_noticed = min(after) - struck
        self.outcome.orphans = self.job.orphans()
        need(not self.outcome.orphans, f"{self.outcome.orphans} ranks go on")


@dataclass
class Kind:
    """A fault, what becomes of it, and how often it is tried."""

    trial: Callable[[Trial], None]
    what_happens: str
    by_moment: bool = True  # else a fifth as often
    waits: bool = False  # it needs time, not a processor


def attempt(
    name: str, kind: Kind, seed: str, home: Path, reference: Reference, cold: bool
) -> Outcome:
    """One fault; what is wrong with what becomes of it is in the outcome."""
    trial = Trial(name, seed, home, reference, cold)
    try:
        kind.trial(trial)
        trial.settle()
    except NotSurvived as error:
        trial.outcome.problem = str(error)
    except Exception:
        trial.outcome.problem = traceback.format_exc()
    finally:
        trial.job.end()
        shutil.rmtree(home, ignore_errors=True)
    return trial.outcome


def matrix(
    kinds: Mapping[str, Kind], repeat: int, seed: int, jobs: int, cold: bool
) -> Iterator[Outcome]:
    """Every kind `repeat` times, or a fifth as often where the moment does not matter."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        reference = Reference(Path(folder) / "reference", first_pairs(Path(folder) / "data"))
        reference.train()
        processors = threading.Semaphore(jobs)

        def attempt_in_turn(name: str, number: int) -> Outcome:
            kind = kinds[name]
            home = Path(tempfile.mkdtemp(dir=folder)) / "job"
            with contextlib.nullcontext() if kind.waits else processors:
                return attempt(name, kind, f"{seed}-{number}", home, reference, cold)

        trials = [
            (name, number)
            for name, kind in kinds.items()
            for number in range(repeat if kind.by_moment else math.ceil(repeat / 5))
        ]
        with ThreadPoolExecutor(jobs + WAITING) as pool:
            yield from pool.map(lambda trial: attempt_in_turn(*trial), trials)


def rows(kinds: Mapping[str, Kind], outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """A row for each kind: what was injected, what survived, what it cost."""
    table = []
    for name in dict.fromkeys(outcome.kind for outcome in outcomes):
        found = [outcome for outcome in outcomes if outcome.kind == name]
        seconds = [outcome.seconds_until_noticed for outcome in found]
        noticed = [value for value in seconds if value is not None]
        table.append(
            {
                "kind": name,
                "injected": len(found),
                "survived": sum(not outcome.problem for outcome in found),
                "most_steps_again": max(outcome.steps_again for outcome in found),
                "seconds_until_noticed": statistics.median(noticed) if noticed else None,
                "orphans": sum(outcome.orphans for outcome in found),
                "left_over": sum(outcome.left_over for outcome in found),
                "what_happens": kinds[name].what_happens,
            }
        )
    return table
