"""What survives what: trainings of two ranks under torchrun, with faults put in from outside.

    python runs/faults.py --repeat 20 --seed 1

A fault strikes a rank in `faulty.py`, or comes from here: a signal to the launcher, a full disk, a
damaged file. A training has survived if it goes on by itself, or refuses in a line that says why
and goes on with the same command when that has been mended, and if then its last checkpoint
(weights, optimizer, random numbers, place in the data) is bit for bit that of a training without a
fault.
"""

import argparse
import contextlib
import hashlib
import json
import math
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import warm
from finetune.data import FILES, SAMPLE

PAIRS = 60  # of the sample: an epoch has seven steps of 2 x 4 pairs
STEPS, EVERY = 14, 4
SAVES = [4, 8, 12, 14]
DDPS = ("simple", "miniddp", "torch")
OPTIONS = ["--model=tiny", "--epochs=2", f"--steps={STEPS}", "--batch-size=4", "--max-length=8"]
OPTIONS += [f"--checkpoint-every={EVERY}", "--resume=auto"]
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


def need(condition: object, problem: str) -> None:
    if not condition:
        raise NotSurvived(problem)


class Process:
    """A torchrun that has been started, with a warm start or from scratch."""

    context = multiprocessing.get_context("forkserver")
    lock = threading.Lock()  # one thread at a time may ask for an exit code

    def __init__(self, arguments: Sequence[str], environment: dict[str, str], output: Path) -> None:
        self.output = output
        self.started = time.time()
        cold = bool(environment.get("FAULTS_COLD"))
        what = (arguments, environment, output, not cold)
        self.process = self.context.Process(target=warm.launch, args=what)
        with self.lock:
            self.process.start()

    @property
    def code(self) -> int | None:
        with self.lock:
            return self.process.exitcode

    def send(self, number: int) -> float:
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


def wait_for(condition: Callable[[], object], problem: str, seconds: float = HANGS) -> None:
    end = time.monotonic() + seconds
    while not condition():
        need(time.monotonic() < end, problem)
        time.sleep(0.01)


class Job:
    """A folder of its own for a training, what its processes noted, and what they left."""

    def __init__(self, home: Path, data: Path, seed: str, cold: bool = False) -> None:
        self.home, self.data, self.cold = home, data, cold
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


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def file(step: int) -> str:
    return f"step-{step:08d}.safetensors"


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
        alone = Job(self.home / "alone", self.data, "alone")
        other = Job(self.home / "other", self.data, "other")
        for process in (
            alone.run("--steps=8", ranks=1),
            other.run("--model=5m", "--steps=1"),
        ):
            need(process.code == 0, process.text)

    @cached_property
    def checkpoint(self) -> Path:
        return self.home / "simple" / "saved" / file(12)


def first_pairs(folder: Path) -> Path:
    """So short an epoch that a training sees two."""
    folder.mkdir()
    text = "".join(SAMPLE.read_text("utf-8").splitlines(keepends=True)[: PAIRS + 1])
    for name in FILES.values():
        (folder / name).write_text(text, "utf-8")
    return folder


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# What the trials have in common


class Trial:
    """A job, the reference, and what is checked of every fault."""

    def __init__(self, kind: str, seed: str, home: Path, reference: Reference, cold: bool) -> None:
        self.outcome = Outcome(kind, seed)
        self.job = Job(home, reference.data, f"{kind} {seed}", cold)
        self.reference, self.ddp = reference, "simple"
        self.random, self.saved = self.job.random, self.job.saved

    def run(self, *options: str, **chosen: Any) -> Process:
        return self.job.run(f"--ddp={self.ddp}", *options, **chosen)

    def start(self, *options: str, **chosen: Any) -> Process:
        return self.job.start(f"--ddp={self.ddp}", *options, **chosen)

    def any_rank(self) -> int:
        return self.random.randrange(2)

    def any_step(self, first: int = 1, last: int = STEPS - 1) -> int:
        return self.random.randint(first, last)

    def finished(self, process: Process, restarts: int | None = None) -> None:
        """The training is at its end, and nothing is missing or too much."""
        need(process.code == 0, f"exit code {process.code}:\n{process.text[-3000:]}")
        expected = self.reference.evaluation[self.ddp]
        need(process.last_line == expected, f"{process.last_line!r}, not {expected!r}")
        same = digest(self.saved / file(STEPS)) == self.reference.digests[self.ddp]
        need(same, "the last checkpoint is another than without the fault")
        self.outcome.left_over = len(self.job.files() - {file(12), file(STEPS)})
        need(not self.outcome.left_over, f"left over: {self.job.files()}")

    def refused(self, process: Process, *words: str, code: int = 1) -> None:
        """One line says why, as the last of the screen and only there."""
        lines = [x for x in process.text.splitlines() if all(word in x for word in words)]
        need(process.code == code, f"exit code {process.code}:\n{process.text[-3000:]}")
        need(lines, f"nothing says {words}:\n{process.text[-3000:]}")
        need(process.last_line == lines[-1], f"not the last line: {process.text[-1000:]}")
        frames = re.search(r'miniddp/\w+\.py", line', process.text)
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
        if struck := self.job.struck or (faults[0] if faults else None):
            ends = [process.ended for process in self.job.processes if hasattr(process, "ended")]
            starts = [note["time"] for note in self.job.notes("start")]
            after = [moment for moment in (*starts, *ends) if moment > struck]
            if after:
                self.outcome.seconds_until_noticed = min(after) - struck
        self.outcome.orphans = self.job.orphans()
        need(not self.outcome.orphans, f"{self.outcome.orphans} ranks go on")


# The faults


def killed(phase: str, trial: Trial) -> None:
    """A rank is killed at a random moment of this phase; torchrun starts the ranks again."""
    if phase != "all-reduce":  # the DDPs have theirs in backward
        trial.ddp = trial.random.choice(DDPS)
    step = trial.random.choice(SAVES) if phase == "save" else trial.any_step()
    trial.finished(trial.run(fault=in_phase(trial, phase, signal.SIGKILL, step), restarts=3))


def in_phase(trial: Trial, phase: str, number: int, step: int) -> dict[str, Any]:
    delay = trial.random.random() * trial.reference.seconds[phase]
    place = {"phase": phase, "rank": trial.any_rank(), "step": step}
    return {"kind": "signal", "signal": int(number), "delay": delay, **place}


def stopped_for_a_while(trial: Trial) -> None:
    phase = trial.random.choice(["forward", "backward", "all-reduce", "optimizer step"])
    fault = in_phase(trial, phase, signal.SIGSTOP, trial.any_step())
    process = trial.start(fault=fault)
    trial.job.struck = math.inf  # nobody has to notice
    wait_for(lambda: trial.job.notes("fault") or trial.job.has_ended, "no rank stops")
    time.sleep(0.5 + trial.random.random())
    for note in trial.job.notes("fault"):
        os.kill(note["pid"], signal.SIGCONT)
    process.wait()
    trial.finished(process)
    need(len(trial.job.notes("start")) == 2, "ranks were started again")


def stopped_for_ever(trial: Trial) -> None:
    """The others give up after --timeout; torchrun kills the stopped one after 30 seconds."""
    phase = trial.random.choice(["forward", "backward", "all-reduce", "optimizer step"])
    fault = in_phase(trial, phase, signal.SIGSTOP, trial.any_step())
    process = trial.run("--timeout=20", fault=fault, restarts=3)
    trial.finished(process)
    words = f"the others wait for rank {fault['rank']}"
    need(words in process.text, f"nobody says: {words}\n{process.text[-3000:]}")


def left(kind: str, trial: Trial) -> None:
    fault = {"kind": kind, "rank": trial.any_rank(), "step": trial.any_step()}
    trial.finished(trial.run("--timeout=20", fault=fault, restarts=3))


def launcher_signalled(number: int, trial: Trial) -> None:
    """The ranks save and leave; the same command goes on."""
    process = trial.start()
    trial.job.reach(trial.any_step(last=STEPS - 3))
    trial.job.struck = process.send(number)
    process.wait()
    need(process.code, "torchrun says that all is well")
    need("stopped by a signal after step" in process.text, process.text[-3000:])
    trial.mended()


def launcher_killed(trial: Trial) -> None:
    process = trial.start()
    trial.job.reach(trial.any_step())
    trial.job.struck = process.send(signal.SIGKILL)
    process.wait()
    need(not trial.job.orphans(), "ranks go on without torchrun")
    trial.mended()


def two_launches(trial: Trial) -> None:
    """Whoever comes second is told so, and harms nothing."""
    first = trial.start()
    time.sleep(trial.random.random())
    second = trial.run()
    first.wait()
    if first.code == 0 and second.code == 0:  # one was over before the other began
        need("resumed after step" in first.text + second.text, "both trained")
        return trial.finished(second)
    winner, loser = sorted((first, second), key=lambda process: process.code or 0)
    trial.job.struck = loser.started
    trial.refused(loser, "another training is using it")
    trial.finished(winner)
    trial.mended()


def folder_gone(trial: Trial) -> None:
    """Checkpoints that are deleted while a training goes on are lost; it is not."""
    process = trial.start()
    trial.job.reach(trial.any_step(last=STEPS - 3))
    trial.job.struck = time.time()
    for _ in range(100):  # a file may appear while others are deleted
        shutil.rmtree(trial.saved, ignore_errors=True)
        if not trial.saved.exists():
            break
    process.wait()
    if process.code:  # it was just being saved there
        trial.refused(process, "cannot save step", "No such file or directory")
    if trial.job.files() <= {file(STEPS)}:
        process = trial.run()
    finished_alone = trial.job.files() == {file(STEPS)}
    if finished_alone:
        (trial.saved / file(12)).touch()  # the one before it was deleted
    trial.finished(process)


def disk_full(trial: Trial) -> None:
    """The disk has room for a part of the checkpoints only, and then for all."""
    size = trial.reference.checkpoint.stat().st_size
    with Disk(trial.saved) as disk:
        room = int(size * trial.random.uniform(0.05, 2.9))
        fault = disk.fill(room, size)
        process = trial.run(fault=fault)
        trial.job.struck = process.ended
        trial.refused(process, "cannot save step")
        kept = trial.job.files()
        need(all(name.endswith(".safetensors") for name in kept), f"left over: {kept}")
        disk.free()
        trial.mended()


def read_only(trial: Trial) -> None:
    with Disk(trial.saved) as disk:
        process = trial.start()
        trial.job.reach(trial.any_step(last=STEPS - 3))
        trial.job.struck = time.time()
        disk.forbid()
        process.wait()
        trial.refused(process, "cannot ")
        trial.refused(trial.run(), "cannot write into" if disk.is_mounted else "cannot")
        disk.allow()
        trial.mended()


def damaged(how: str, trial: Trial) -> None:
    """The newest checkpoint cannot be read: the one before it is taken, with a warning."""
    copy_checkpoints(trial, 8, 12)
    path = trial.saved / file(12)
    content = bytearray(path.read_bytes())
    if how == "bits flipped":
        for _ in range(trial.random.randint(1, 3)):
            content[trial.random.randrange(len(content))] ^= 1 << trial.random.randrange(8)
    if how == "cut off":
        del content[trial.random.randrange(len(content)) :]
    if how == "too long":
        content += trial.random.randbytes(trial.random.randint(1, 100))
    if how == "foreign":
        content = bytearray(trial.random.randbytes(trial.random.randint(0, 10_000)))
    if how == "hostile":
        content = bytearray(pickle.dumps(Hostile(str(trial.job.home / "executed"))))
    path.write_bytes(content)
    trial.job.struck = time.time()
    process = trial.run()
    words = f"skipped a checkpoint: rank {{}}: {path} is damaged or no checkpoint"
    said = any(words.format(rank) in process.text for rank in (0, 1))
    said = said or words.replace("rank {}: ", "") in process.text
    need(said, f"no warning: {process.text[-3000:]}")
    need(not (trial.job.home / "executed").exists(), "its code was executed")
    need(f"resumed after step 8 from {trial.saved / file(8)}" in process.text, process.text)
    trial.finished(process)


class Hostile:
    """Pickled, it creates a file when it is read."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.file, "w")


def all_damaged(trial: Trial) -> None:
    """To begin anew would lose them: so it is refused, until they are put away."""
    for step in (8, 12):
        (trial.saved / file(step)).write_bytes(trial.random.randbytes(1000))
    note_steps(trial, 12)
    process = trial.run()
    trial.job.struck = process.started
    trial.refused(process, "no checkpoint in", "that every rank can read")
    for step in (8, 12):
        (trial.saved / file(step)).unlink()
    trial.mended()


def of_another(what: str, trial: Trial) -> None:
    """A whole checkpoint of another model, or of another number of ranks."""
    copy_checkpoints(trial, 8)
    name, step = {"model": ("other", 1), "number of ranks": ("alone", 8)}[what]
    shutil.copy(trial.reference.home / name / "saved" / file(step), trial.saved / file(12))
    process = trial.run()
    trial.job.struck = process.started
    words = {"model": "saved with --model 5m, not tiny"}
    words["number of ranks"] = "saved on 1 ranks, now there are 2: only an elastic resume goes on"
    trial.refused(process, words[what])
    trial.has_only(8, 12)
    (trial.saved / file(12)).unlink()
    trial.mended()


def not_finite(trial: Trial) -> None:
    step, rank = trial.any_step(), trial.any_rank()
    process = trial.run(fault={"kind": "nan", "rank": rank, "step": step}, restarts=3)
    last = max((save for save in SAVES if save < step), default=None)
    good = trial.saved / file(last) if last else None
    what = f"the loss of step {step} is not finite on rank {rank}"
    trial.refused(process, f"{what}; the last good checkpoint: {good}")
    trial.has_only(*[save for save in SAVES if save < step][-2:])
    trial.mended()


def options_differ(trial: Trial) -> None:
    name, value, own = trial.random.choice(
        [("--lr", "0.01", "0.001"), ("--seed", "3", "0"), ("--steps", "13", "14")]
    )
    fault = {"kind": "options", "rank": 1, "options": [name, value]}
    process = trial.run(fault=fault, restarts=1)
    trial.refused(process, f"{name} is {own} on rank 0, and {value} on rank 1")
    trial.has_only()
    trial.mended()


def copy_checkpoints(trial: Trial, *steps: int) -> None:
    for step in steps:
        shutil.copy(trial.reference.checkpoint.with_name(file(step)), trial.saved)
    note_steps(trial, max(steps))


def note_steps(trial: Trial, last: int) -> None:
    """Who made the checkpoints of this folder has taken the steps up to the last one's."""
    with (trial.job.home / "notes").open("a") as notes:
        for step in range(1, last + 1):
            notes.write(json.dumps({"what": "step", "rank": 0, "step": step}) + "\n")


@cache
def say_once(text: str) -> None:
    print(text, flush=True)


class Disk:
    """A small disk at a folder. Who may not mount one gets a limit of the files' size instead."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.is_covered = folder, False

    def __enter__(self) -> "Disk":
        self.is_mounted = self.mount("-t", "tmpfs", "-o", "size=64m", "none")
        if not self.is_mounted:
            say_once("no disk can be mounted here: a limit of the files' size stands in")
        return self

    def __exit__(self, *_: object) -> None:
        self.allow()
        if self.is_mounted:
            self.unmount()

    def mount(self, *options: str) -> bool:
        return not subprocess.run(["mount", *options, self.folder], capture_output=True).returncode

    def fill(self, room: int, size: int) -> dict[str, Any] | None:
        if self.is_mounted:
            self.mount("-o", f"remount,size={room}")
            return None
        return {"kind": "limit", "bytes": room % size}

    def free(self) -> None:
        if self.is_mounted:
            self.mount("-o", "remount,size=64m")

    def forbid(self) -> None:
        """By a mount over it: the disk itself is busy while somebody has a file open to write."""
        if self.is_mounted:
            self.is_covered = self.mount("--bind", str(self.folder))
            self.mount("-o", "remount,bind,ro")
        else:
            self.folder.chmod(0o555)

    def allow(self) -> None:
        if self.is_covered:
            self.unmount()
            self.is_covered = False
        elif not self.is_mounted:
            self.folder.chmod(0o755)

    def unmount(self) -> None:
        subprocess.run(["umount", "--lazy", self.folder], check=True)


PHASES = {  # of faulty.PHASES, and how one says it
    "forward": "forward",
    "backward": "backward",
    "all-reduce": "the all-reduce",
    "optimizer step": "the optimizer step",
    "save": "a save",
    "evaluation": "the evaluation",
}
RESTARTED = "torchrun starts the ranks again, and they go on"
REFUSED = "is refused in one line, the checkpoints are left alone"


@dataclass
class Kind:
    """A fault, what becomes of it, and how often it is tried."""

    trial: Callable[[Trial], None]
    what_happens: str
    by_moment: bool = True  # else a fifth as often
    waits: bool = False  # it needs time, not a processor


STOPPED = "the ranks save and leave; the same command goes on"
KINDS = {
    "a rank stands still for ever": Kind(
        stopped_for_ever,
        f"the others give up in time and name it; {RESTARTED}",
        waits=True,
    ),
    **{
        f"a rank is killed in {where}": Kind(partial(killed, phase), RESTARTED)
        for phase, where in PHASES.items()
    },
    "a rank stands still for a while": Kind(stopped_for_a_while, "the others wait for it"),
    "a rank leaves the loop": Kind(partial(left, "leave"), RESTARTED, by_moment=False),
    "a rank ends without an error": Kind(partial(left, "exit"), RESTARTED, by_moment=False),
    "SIGTERM to torchrun": Kind(partial(launcher_signalled, signal.SIGTERM), STOPPED),
    "Ctrl+C at torchrun": Kind(partial(launcher_signalled, signal.SIGINT), STOPPED),
    "SIGKILL to torchrun": Kind(launcher_killed, "the ranks end too; the same command goes on"),
    "a second start into the same folder": Kind(two_launches, REFUSED),
    "the folder is deleted": Kind(folder_gone, "the next save makes it anew"),
    "the disk is full": Kind(disk_full, "one line says so; goes on when there is room"),
    "the disk becomes read-only": Kind(read_only, "one line says so; goes on when it can write"),
    **{
        f"the newest checkpoint: {how}": Kind(
            partial(damaged, how), "a warning, and the one before it is taken", by_moment=False
        )
        for how in ("bits flipped", "cut off", "too long", "foreign", "hostile")
    },
    "no checkpoint can be read": Kind(all_damaged, REFUSED, by_moment=False),
    **{
        f"a checkpoint of another {what}": Kind(partial(of_another, what), REFUSED, by_moment=False)
        for what in ("model", "number of ranks")
    },
    "a loss is not a number": Kind(
        not_finite, "one line says so, before anything is saved", by_moment=False
    ),
    "the ranks' options differ": Kind(
        options_differ, "one line says so, before anything is loaded", by_moment=False
    ),
}


# The matrix


def attempt(kind: str, seed: str, home: Path, reference: Reference, cold: bool) -> Outcome:
    """One fault; what is wrong with what becomes of it is in the outcome."""
    trial = Trial(kind, seed, home, reference, cold)
    try:
        KINDS[kind].trial(trial)
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
    kinds: Sequence[str], repeat: int, seed: int, jobs: int, cold: bool
) -> Iterator[Outcome]:
    """Every kind `repeat` times, or a fifth as often where the moment does not matter."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        reference = Reference(Path(folder) / "reference", first_pairs(Path(folder) / "data"))
        reference.train()
        trials = [
            (kind, f"{seed}-{number}", Path(folder) / str(count * 1000 + number))
            for count, kind in enumerate(kinds)
            for number in range(repeat if KINDS[kind].by_moment else math.ceil(repeat / 5))
        ]
        processors = threading.Semaphore(jobs)

        def attempt_in_turn(kind: str, seed: str, home: Path) -> Outcome:
            with contextlib.nullcontext() if KINDS[kind].waits else processors:
                return attempt(kind, seed, home, reference, cold)

        with ThreadPoolExecutor(jobs + WAITING) as pool:
            yield from pool.map(lambda trial: attempt_in_turn(*trial), trials)


def rows(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """A row for each kind: what was injected, what survived, what it cost."""
    table = []
    for kind in dict.fromkeys(outcome.kind for outcome in outcomes):
        of_kind = [outcome for outcome in outcomes if outcome.kind == kind]
        noticed = [o.seconds_until_noticed for o in of_kind if o.seconds_until_noticed is not None]
        table.append(
            {
                "kind": kind,
                "injected": len(of_kind),
                "survived": sum(not outcome.problem for outcome in of_kind),
                "most_steps_again": max(outcome.steps_again for outcome in of_kind),
                "seconds_until_noticed": statistics.median(noticed) if noticed else None,
                "orphans": sum(outcome.orphans for outcome in of_kind),
                "left_over": sum(outcome.left_over for outcome in of_kind),
                "what_happens": KINDS[kind].what_happens,
            }
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=20, help="where the moment matters")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--jobs", type=int, default=3, help="trainings at once")
    parser.add_argument("--only", default="", help="the faults with this in their name")
    parser.add_argument("--cold", action="store_true", help="start every Python from scratch")
    parser.add_argument("--json", type=Path, help="a file for all that was found")
    chosen = parser.parse_args()
    kinds = [kind for kind in KINDS if chosen.only in kind]
    if not kinds:
        parser.error(f"no fault has {chosen.only!r} in its name")
    os.environ.update(ENVIRONMENT)
    path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))  # for the preload
    Process.context.set_forkserver_preload(["warm"])
    print(f"seed {chosen.seed}", flush=True)
    outcomes = []
    for outcome in matrix(kinds, chosen.repeat, chosen.seed, chosen.jobs, chosen.cold):
        outcomes.append(outcome)
        if outcome.problem:
            print(f"LOST: {outcome.kind} (seed {outcome.seed}): {outcome.problem}", flush=True)
    found = rows(outcomes)
    for row in found:
        noticed = row["seconds_until_noticed"]
        print(
            f"{row['survived']:3} of {row['injected']:3} {row['kind']:40}"
            f" at most {row['most_steps_again']:2} steps again,"
            f" noticed after {'–' if noticed is None else f'{noticed:.1f} s'},"
            f" {row['orphans']} orphans, {row['left_over']} files left over"
        )
    if chosen.json:
        content = {"seed": chosen.seed, "rows": found, "outcomes": list(map(asdict, outcomes))}
        chosen.json.write_text(json.dumps(content, indent=1))
    survived = sum(not outcome.problem for outcome in outcomes)
    print(f"faults: {len(outcomes)} injected, {survived} survived, {len(outcomes) - survived} lost")
    return int(survived < len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
