"""Trainings with a fault: what is checked of each, and what the fault cost.

A trial is a training of two ranks with one fault. `matrix` makes them, `rows` counts them.
"""

import contextlib
import math
import re
import shutil
import statistics
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.data import FILES, SAMPLE
from instruments.launched_jobs import (
    STEPS,
    Job,
    NotSurvived,
    Process,
    digest,
    file,
    need,
)

PAIRS = 60  # of the sample: an epoch has seven steps of 2 x 4 pairs
DDPS = ("simple", "miniddp", "torch")
WAITING = 10  # trainings at once that wait for a timeout


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
        other = Job(self.home / "other", self.data, "other").run(
            "--model=5m", "--steps=1"
        )
        for process in (alone, other):
            need(process.code == 0, process.text)

    def trial(self, kind: str, seed: str, home: Path, cold: bool) -> "Trial":
        """A training like these, to be disturbed."""
        return Trial(kind, seed, home, self, cold)

    def checkpoint(self, step: int, of: str = "simple") -> Path:
        """Of a training with one of `DDPS`, or of "alone" or "other"."""
        return self.home / of / "saved" / file(step)


def trainer(folder: Path) -> Reference:
    """Trainings with `finetune` in this folder."""
    reference = Reference(folder / "reference", first_pairs(folder / "data"))
    reference.train()
    return reference


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

    def __init__(
        self, kind: str, seed: str, home: Path, reference: Reference, cold: bool
    ) -> None:
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
        lines = [
            x for x in process.text.splitlines() if all(word in x for word in words)
        ]
        need(process.code == 1, f"exit code {process.code}:\n{process.text[-3000:]}")
        need(lines, f"nothing says {words}:\n{process.text[-3000:]}")
        need(
            process.last_line == lines[-1], f"not the last line: {process.text[-1000:]}"
        )
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

    trial: Callable[[Any], None]
    what_happens: str
    by_moment: bool = True  # else a fifth as often
    waits: bool = False  # it needs time, not a processor


def attempt(trial: Any, fault: Callable[[Any], None]) -> Outcome:
    """One fault; what is wrong with what becomes of it is in the outcome."""
    outcome: Outcome = trial.outcome
    try:
        fault(trial)
        trial.settle()
    except NotSurvived as error:
        outcome.problem = str(error)
    except Exception:
        outcome.problem = traceback.format_exc()
    finally:
        trial.job.end()
        shutil.rmtree(trial.job.home, ignore_errors=True)
    return outcome


def matrix(
    kinds: Mapping[str, Kind],
    undisturbed: Callable[[Path], Any],
    repeat: int,
    seed: int,
    jobs: int,
    cold: bool,
) -> Iterator[Outcome]:
    """Every kind `repeat` times, or a fifth as often where the moment does not matter.

    `undisturbed`, called once with a folder, makes what all trials are compared with;
    its `trial` makes each.
    """
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        reference = undisturbed(Path(folder))
        processors = threading.Semaphore(jobs)

        def attempt_in_turn(name: str, number: int) -> Outcome:
            kind = kinds[name]
            home = Path(tempfile.mkdtemp(dir=folder)) / "job"
            with contextlib.nullcontext() if kind.waits else processors:
                trial = reference.trial(name, f"{seed}-{number}", home, cold)
                return attempt(trial, kind.trial)

        trials = [
            (name, number)
            for name, kind in kinds.items()
            for number in range(repeat if kind.by_moment else math.ceil(repeat / 5))
        ]
        with ThreadPoolExecutor(jobs + WAITING) as pool:
            yield from pool.map(lambda trial: attempt_in_turn(*trial), trials)


def rows(
    kinds: Mapping[str, Kind], outcomes: Sequence[Outcome]
) -> list[dict[str, Any]]:
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
                "seconds_until_noticed": statistics.median(noticed)
                if noticed
                else None,
                "orphans": sum(outcome.orphans for outcome in found),
                "left_over": sum(outcome.left_over for outcome in found),
                "what_happens": kinds[name].what_happens,
            }
        )
    return table
