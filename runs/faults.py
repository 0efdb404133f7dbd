"""What survives what: trainings of two ranks under torchrun, with faults put in from outside.

    python runs/faults.py --repeat 20 --seed 1

A fault strikes a rank in `faulty.py`, or comes from here: a signal to the launcher, a full disk, a
damaged file. A training has survived if it goes on by itself, or refuses in a line that says why
and goes on with the same command when that has been mended, and if then its last checkpoint
(weights, optimizer, random numbers, place in the data) is bit for bit that of a training without a
fault. `instruments.trials` checks the trainings. The runbook's script to copy is treated likewise:
`instruments.copied_script`.
"""

import argparse
import json
import math
import os
import pickle
import random
import shutil
import signal
import sys
import time
from functools import cache, partial
from pathlib import Path
from typing import Any

from instruments import copied_script, warm_start
from instruments.launched_jobs import (
    ENVIRONMENT,
    SAVES,
    STEPS,
    Process,
    file,
    need,
    wait_for,
)
from instruments.small_disk import SmallDisk
from instruments.trials import DDPS, Kind, Trial, matrix, rows, trainer


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
    process = trial.run("--timeout=30", fault=fault, restarts=3)
    trial.finished(process)
    words = f"the others wait for rank {fault['rank']}"
    need(words in process.text, f"nobody says: {words}\n{process.text[-3000:]}")


def left(kind: str, trial: Trial) -> None:
    fault = {"kind": kind, "rank": trial.any_rank(), "step": trial.any_step()}
    trial.finished(trial.run("--timeout=20", fault=fault, restarts=3))


def launcher_signalled(number: int, trial: Trial) -> None:
    """The ranks save and leave; the same command goes on."""
    process = trial.start()
    trial.job.reach(trial.any_step(last=STEPS // 2))
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
    trial.job.reach(trial.any_step(last=STEPS // 2))
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
    size = trial.reference.checkpoint(12).stat().st_size
    room = int(size * trial.random.uniform(0.05, 2.9))
    with SmallDisk(trial.saved) as disk:
        fault = None
        if disk.is_mounted:
            disk.fill(room)
        else:
            say_once("no disk can be mounted here: a limit of the files' size stands in")
            fault = {"kind": "limit", "bytes": room % size}
        process = trial.run(fault=fault)
        trial.job.struck = process.ended
        trial.refused(process, "cannot save step")
        kept = trial.job.files()
        need(all(name.endswith(".safetensors") for name in kept), f"left over: {kept}")
        disk.free()
        trial.mended()


def read_only(trial: Trial) -> None:
    with SmallDisk(trial.saved) as disk:
        process = trial.start()
        trial.job.reach(trial.any_step(last=STEPS // 2))
        trial.job.struck = time.time()
        disk.forbid()
        was_over = file(STEPS) in trial.job.files()
        process.wait()
        if was_over:
            return trial.finished(process)
        trial.refused(process, "cannot ")
        trial.refused(trial.run(), "cannot write into" if disk.is_mounted else "cannot")
        disk.allow()
        trial.mended()


def damaged(how: str, trial: Trial) -> None:
    """The newest checkpoint cannot be read: the one before it is taken, with a warning."""
    trial.copy_checkpoints(8, 12)
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
    warning = f"skipped a checkpoint: {path} is damaged or no checkpoint"
    need(warning in process.text, f"no warning: {process.text[-3000:]}")
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
    trial.job.note_steps(12)
    process = trial.run()
    trial.job.struck = process.started
    trial.refused(process, "no checkpoint in", "is whole")
    for step in (8, 12):
        (trial.saved / file(step)).unlink()
    trial.mended()


def of_another(what: str, trial: Trial) -> None:
    """A whole checkpoint of another model, or of another number of ranks."""
    trial.copy_checkpoints(8)
    if what == "model":
        foreign = trial.reference.checkpoint(1, of="other")
        reason = "saved with --model 5m, not tiny"
    else:
        foreign = trial.reference.checkpoint(8, of="alone")
        reason = "saved on 1 ranks, now there are 2: only an elastic resume goes on"
    shutil.copy(foreign, trial.saved / file(12))
    process = trial.run()
    trial.job.struck = process.started
    trial.refused(process, reason)
    trial.has_only(8, 12)
    (trial.saved / file(12)).unlink()
    trial.mended()


def not_finite(trial: Trial) -> None:
    step = trial.any_step()
    rank = trial.any_rank()
    process = trial.run(fault={"kind": "nan", "rank": rank, "step": step}, restarts=3)
    last = max((save for save in SAVES if save < step), default=None)
    good = trial.saved / file(last) if last else None
    what = f"the loss of step {step} is not finite on rank {rank}"
    trial.refused(process, f"{what}; the last good checkpoint: {good}")
    trial.has_only(*[save for save in SAVES if save < step][-2:])
    trial.mended()


def options_differ(trial: Trial) -> None:
    name, there, here = trial.random.choice(
        [("--lr", "0.01", "0.001"), ("--seed", "3", "0"), ("--steps", "13", "14")]
    )
    fault = {"kind": "options", "rank": 1, "options": [name, there]}
    process = trial.run(fault=fault, restarts=1)
    trial.refused(process, f"{name} is {here} on rank 0, and {there} on rank 1")
    trial.has_only()
    trial.mended()


@cache
def say_once(text: str) -> None:
    print(text, flush=True)


# What becomes of each


PHASES = {  # of faulty.PHASES, as one says it
    "forward": "forward",
    "backward": "backward",
    "all-reduce": "the all-reduce",
    "optimizer step": "the optimizer step",
    "save": "a save",
    "evaluation": "the evaluation",
}
RESTARTED = "torchrun starts the ranks again, and they go on"
REFUSED = "is refused in one line, the checkpoints are left alone"
STOPPED = "the ranks save and leave; the same command goes on"
KINDS = {
    "a rank stands still for ever": Kind(
        stopped_for_ever,
        f"the others give up in time and name it; {RESTARTED}",
        waits=True,
    ),
    **{
        f"a rank is killed in {spoken}": Kind(partial(killed, phase), RESTARTED)
        for phase, spoken in PHASES.items()
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


PROGRAMS = {
    "trainer": (trainer, KINDS),
    "script": (copied_script.Undisturbed, copied_script.KINDS),
}


def try_all(program: str, chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """The chosen faults of a program, a row for each kind; what is lost is said at once."""
    undisturbed, all_kinds = PROGRAMS[program]
    kinds = {name: kind for name, kind in all_kinds.items() if chosen.only in name}
    if not kinds:
        return []
    how_often = (chosen.repeat, chosen.seed, chosen.jobs, chosen.cold)
    outcomes = []
    for outcome in matrix(kinds, undisturbed, *how_often):
        outcomes.append(outcome)
        if outcome.problem:
            print(f"LOST: {outcome.kind} (seed {outcome.seed}): {outcome.problem}", flush=True)
    return [{"program": program, **row} for row in rows(kinds, outcomes)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=20, help="where the moment matters")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--jobs", type=int, default=3, help="trainings at once")
    parser.add_argument("--program", choices=PROGRAMS, help="one of them only")
    parser.add_argument("--only", default="", help="the faults with this in their name")
    parser.add_argument("--cold", action="store_true", help="start every Python from scratch")
    parser.add_argument("--json", type=Path, help="a file for all that was found")
    chosen = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    Process.context.set_forkserver_preload([warm_start.__name__])
    print(f"seed {chosen.seed}", flush=True)
    found = []
    for program in [chosen.program] if chosen.program else PROGRAMS:
        found += try_all(program, chosen)
    if not found:
        parser.error(f"no fault has {chosen.only!r} in its name")
    for row in found:
        noticed = row["seconds_until_noticed"]
        print(
            f"{row['survived']:3} of {row['injected']:3} {row['program']}: {row['kind']:40}"
            f" at most {row['most_steps_again']:2} steps again,"
            f" noticed after {'–' if noticed is None else f'{noticed:.1f} s'},"
            f" {row['orphans']} orphans, {row['left_over']} files left over"
        )
    if chosen.json:
        chosen.json.write_text(json.dumps({"seed": chosen.seed, "rows": found}, indent=1))
    injected = sum(row["injected"] for row in found)
    survived = sum(row["survived"] for row in found)
    print(f"faults: {injected} injected, {survived} survived, {injected - survived} lost")
    return int(survived < injected)


if __name__ == "__main__":
    sys.exit(main())
