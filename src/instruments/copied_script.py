"""The runbook's script to copy, disturbed from outside: the same bits, or a refusal.

A script has survived what a trainer of `trials` survives: it goes on by itself or after
the same command, or refuses in a line and goes on when what was wrong has been mended.
At the end its checkpoint is that of a script that nothing has disturbed.
"""

import os
import random
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from instruments.batch_job import changed
from instruments.launched_jobs import (
    Job,
    Process,
    is_running,
    need,
    ranks,
    wait_for,
)
from instruments.small_disk import SmallDisk
from instruments.trials import Kind, Outcome

SCRIPT = Path(__file__).parents[2] / "runs/preemptible.py"
STEPS = 600
SAVE_EVERY = 20
SIZES = {"= 400, 100, 10": f"= {STEPS}, {SAVE_EVERY}, 10"}
LIMIT = "    __import__('resource').setrlimit(1, (20_000, 20_000))\n"  # of a file


class ScriptJob(Job):
    """The script in a folder of its own, in which it may be changed."""

    def __init__(self, home: Path, seed: str, cold: bool = False) -> None:
        super().__init__(home, home, seed, cold)
        self.copy = home / "preemptible.py"
        self.checkpoint = self.saved / "checkpoint.pt"
        self.launched: set[int] = set()
        self.change({})

    def change(self, changes: dict[str, str]) -> None:
        """Write the script: of other sizes, with these changes, counting what it does."""
        text = SCRIPT.read_text(encoding="utf-8")
        begun = "signals: list[int] = []\n"
        step = "        step += 1\n"
        counted = {
            begun: f"{begun}{self.count('begun')}",
            step: f"{step}        {self.count('steps')}",
        }
        text = changed(text, {**SIZES, **counted, **changes})
        self.copy.write_text(text, encoding="utf-8")

    def count(self, what: str) -> str:
        return f"open({str(self.home / what)!r}, 'a').write('+')\n"

    def counted(self, what: str) -> int:
        """How often both ranks did that: began, or took a step, in any start of them."""
        file = self.home / what
        return file.stat().st_size // 2 if file.exists() else 0

    def until_begun(self) -> None:
        """Both ranks have asked to be told of torchrun's end."""
        wait_for(
            lambda: self.counted("begun") or self.has_ended, "a rank does not begin"
        )

    def program(self) -> list[str]:
        return [str(self.copy), str(self.saved)]

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = torch.load(self.checkpoint, weights_only=True)
        return state

    def until_saved(self) -> None:
        wait_for(lambda: self.checkpoint.exists() or self.has_ended, "no checkpoint")

    def note_ranks(self, process: Process) -> list[int]:
        """The ranks that live now, which `orphans` looks for later."""
        found = ranks(process.process.pid or 0)
        self.launched.update(found)
        return found

    def orphans(self) -> int:
        """Ranks that neither leave nor finish without a launcher; they are then killed."""
        end = time.monotonic() + 60
        while time.monotonic() < end and any(map(is_running, self.launched)):
            time.sleep(0.01)
        left = [pid for pid in self.launched if is_running(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return len(left)


class Undisturbed:
    """A script that nothing disturbs, a checkpoint on its way, and its seconds."""

    def __init__(self, folder: Path) -> None:
        job = ScriptJob(folder / "reference", "reference")
        process = job.start()
        job.until_saved()
        (job.saved / "leave").touch()
        need(process.wait() == 0, process.text)
        self.half_way = folder / "half-way.pt"
        shutil.copy(job.checkpoint, self.half_way)
        need(job.state()["step"] < STEPS, "it has not left")
        (job.saved / "leave").unlink()
        job.checkpoint.unlink()
        process = job.run()
        need(process.code == 0 and process.ended, process.text)
        self.seconds = (process.ended or 0) - process.started
        self.state = job.state()

    def trial(self, kind: str, seed: str, home: Path, cold: bool) -> "ScriptTrial":
        return ScriptTrial(kind, seed, home, self, cold)


class ScriptTrial:
    """A script, the undisturbed one, and what is checked of every fault."""

    def __init__(
        self, kind: str, seed: str, home: Path, reference: Undisturbed, cold: bool
    ) -> None:
        self.outcome = Outcome(kind, seed)
        self.job = ScriptJob(home, f"{kind} {seed}", cold)
        self.reference = reference
        self.random: random.Random = self.job.random
        self.first_step = 0

    def start_and_wait(self, restarts: int = 0) -> Process:
        """Start it, and wait until some moment before its end."""
        process = self.job.start(restarts=restarts)
        time.sleep(self.random.uniform(0, self.reference.seconds))
        return process

    def begin_half_way(self) -> None:
        shutil.copy(self.reference.half_way, self.job.checkpoint)
        self.first_step = self.job.state()["step"]

    def finished(self, process: Process) -> None:
        need(process.code == 0, f"exit code {process.code}:\n{process.text[-3000:]}")
        need((self.job.saved / "done").exists(), f"not done:\n{process.text[-3000:]}")
        torch.testing.assert_close(
            self.job.state(), self.reference.state, rtol=0, atol=0
        )
        left_over = self.job.files() - {"checkpoint.pt", "done", "lock"}
        self.outcome.left_over = len(left_over)
        need(not left_over, f"left over: {left_over}")

    def refused(self, process: Process, words: str) -> None:
        need(process.code == 1, f"exit code {process.code}:\n{process.text[-3000:]}")
        need(words in process.text, f"nothing says {words}:\n{process.text[-3000:]}")
        need("Traceback" not in before_the_launchers(process.text), process.text)
        need(not (self.job.saved / "done").exists(), "it says that it is done")

    def mended(self) -> None:
        """The same command, when what was wrong no longer is."""
        self.finished(self.job.run())

    def settle(self) -> None:
        again = self.job.counted("steps") - (STEPS - self.first_step)
        self.outcome.steps_again = again
        need(0 <= again <= SAVE_EVERY, f"{again} steps were done twice")
        ends = [process.ended for process in self.job.processes if process.ended]
        if self.job.struck and ends:
            self.outcome.seconds_until_noticed = max(0.0, min(ends) - self.job.struck)
        self.outcome.orphans = self.job.orphans()
        need(not self.outcome.orphans, f"{self.outcome.orphans} ranks go on")


def before_the_launchers(text: str) -> str:
    """What the ranks have printed: torchrun tells of them in a traceback of its own."""
    return text.partition("torch/distributed/elastic/multiprocessing/api.py")[0]


def asked_to_end(whom: str, trial: ScriptTrial) -> None:
    process = trial.start_and_wait()
    found = trial.job.note_ranks(process)
    trial.job.struck = time.time()
    if whom == "torchrun":
        process.send(signal.SIGTERM)
    elif found:
        send(trial.random.choice(found), signal.SIGTERM)
    process.wait()
    trial.mended()
    need(trial.job.counted("steps") == STEPS, "not all steps were saved")


def launcher_killed(trial: ScriptTrial) -> None:
    """The ranks get a signal as if they were told to end.

    A rank that has not run its first line yet gets none: it waits for torchrun's store
    until the timeout is over, and trains nothing.
    """
    process = trial.start_and_wait()
    if trial.job.note_ranks(process):
        trial.job.until_begun()
    found = trial.job.note_ranks(process)
    for pid in found:
        send(pid, signal.SIGSTOP)
    saved = trial.job.state()["step"] if trial.job.checkpoint.exists() else STEPS
    trial.job.struck = process.send(signal.SIGKILL)
    process.wait()
    for pid in found:
        send(pid, signal.SIGCONT)
    need(not trial.job.orphans(), "ranks go on without torchrun")
    if saved < STEPS // 2:
        need(trial.job.state()["step"] < STEPS, "the ranks have trained to the end")
    trial.mended()


def rank_killed(trial: ScriptTrial) -> None:
    """torchrun starts the ranks again; there is none to be killed before and after."""
    process = trial.start_and_wait(restarts=1)
    found = trial.job.note_ranks(process)
    if found:
        send(trial.random.choice(found), signal.SIGKILL)
    process.wait()
    trial.finished(process)


def send(pid: int, number: int) -> None:
    """A signal, unless the process has ended in the meantime."""
    if is_running(pid):
        os.kill(pid, number)


def stale_view(what: str, trial: ScriptTrial) -> None:
    """The shared folder shows one rank no checkpoint, or an old one."""
    trial.begin_half_way()
    before = trial.job.checkpoint.read_bytes()
    rank = trial.random.randrange(2)
    if what == "nothing":
        seen = {"if path.exists():": f"if path.exists() and dist.get_rank() != {rank}:"}
    else:
        old = trial.job.home / "old.pt"
        torch.save({**trial.job.state(), "step": 10}, old)
        shown = f"torch.load([path, {str(old)!r}][dist.get_rank() == {rank}],"
        seen = {"torch.load(path,": shown}
    trial.job.change(seen)
    process = trial.job.run()
    trial.job.struck = process.started
    trial.refused(process, "not all ranks see the checkpoint of step")
    need(trial.job.checkpoint.read_bytes() == before, "the checkpoint is another")
    trial.job.change({})
    trial.mended()


def disk_full(trial: ScriptTrial) -> None:
    """There is room for a part of the checkpoints only, and then for all."""
    size = trial.reference.half_way.stat().st_size
    with SmallDisk(trial.job.saved) as disk:
        if disk.is_mounted:
            disk.fill(int(size * trial.random.uniform(0.2, 1.9)))
        else:
            trial.job.change(
                {"    device = start()\n": f"{LIMIT}    device = start()\n"}
            )
        process = trial.job.run()
        trial.job.struck = process.ended
        trial.refused(process, "cannot save step")
        need(not list(trial.job.saved.glob("*.new")), "a part of a file is left")
        trial.job.change({})
        disk.free()
        trial.mended()


def two_starts(trial: ScriptTrial) -> None:
    """Whoever comes second is told so, and harms nothing."""
    first = trial.job.start()
    time.sleep(trial.random.uniform(0, trial.reference.seconds / 2))
    second = trial.job.run()
    first.wait()
    if first.code == 0 and second.code == 0:  # one was over before the other began
        return trial.finished(second)
    winner, loser = sorted((first, second), key=lambda process: process.code or 0)
    is_refused = "another job trains in" in loser.text
    need(is_refused, f"nobody is refused:\n{loser.text[-3000:]}")
    trial.finished(winner)
    trial.mended()


KINDS = {
    "SIGTERM to torchrun, at any moment": Kind(
        partial(asked_to_end, "torchrun"),
        "the ranks save and leave; the same command goes on",
    ),
    "SIGTERM to one rank, at any moment": Kind(
        partial(asked_to_end, "a rank"),
        "the ranks save and leave; the same command goes on",
    ),
    "SIGKILL to torchrun, at any moment": Kind(
        launcher_killed, "the ranks save and leave; the same command goes on"
    ),
    "SIGKILL to a rank, at any moment": Kind(
        rank_killed, "torchrun starts the ranks again, and they go on"
    ),
    "one rank sees no checkpoint": Kind(
        partial(stale_view, "nothing"),
        "is refused, the checkpoint is left alone",
        by_moment=False,
    ),
    "one rank sees an old checkpoint": Kind(
        partial(stale_view, "an old one"),
        "is refused, the checkpoint is left alone",
        by_moment=False,
    ),
    "the disk is full": Kind(disk_full, "one line says so; goes on when there is room"),
    "a second start into the same folder": Kind(
        two_starts, "is refused in one line, the checkpoint is left alone"
    ),
}
