"""finetune.train, with a fault that is put in from outside, once: what `faults.py` starts as ranks.

The environment says where notes are kept (`FAULTS_HOME`) and what shall happen (`FAULT`, as JSON).
"""

import ctypes
import functools
import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import AdamW
from transformers import LlamaForSequenceClassification

from finetune import checkpoint, train, training_step
from finetune.last_words import run
from miniddp.naive import SimpleDDP

PHASES: dict[str, tuple[Any, str]] = {
    "step": (training_step, "train_step"),
    "forward": (LlamaForSequenceClassification, "forward"),
    "backward": (Tensor, "backward"),
    "all-reduce": (SimpleDDP, "sync_gradients"),
    "optimizer step": (AdamW, "step"),
    "save": (checkpoint, "save"),
    "evaluation": (train, "evaluate"),
}


class Left(Exception):  # noqa: N818
    """A rank has left the loop of the steps."""


class Timer(ctypes.Structure):
    """Linux's `struct sigevent`: what the kernel does when a timer ends."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_char * 48),
    )


def signal_after(number: int, seconds: float) -> Callable[[], None]:
    """The kernel sends the signal, in whatever instruction the process then is.

    Call what it returns to have it sent now, if it has not been.
    """
    libc, timer = ctypes.CDLL(None), ctypes.c_void_p()
    libc.timer_create(1, ctypes.byref(Timer(signal=number)), ctypes.byref(timer))  # monotonic
    whole, rest = divmod(max(1, int(seconds * 1e9)), 10**9)
    libc.timer_settime(timer, 0, (ctypes.c_long * 4)(0, 0, whole, rest), None)

    def now() -> None:
        left = (ctypes.c_long * 4)()
        libc.timer_settime(timer, 0, (ctypes.c_long * 4)(), left)
        if any(left):
            os.kill(os.getpid(), number)

    return now


class Faulty:
    """A rank's notes, and the one fault that it is asked for."""

    def __init__(self) -> None:
        self.home = Path(os.environ["FAULTS_HOME"])
        self.fault: dict[str, Any] = json.loads(os.environ.get("FAULT", "null")) or {}
        self.rank = int(os.environ["RANK"])
        self.mine = self.fault.get("rank") == self.rank
        self.step = 0
        self.seconds: dict[str, list[float]] = {}

    def note(self, what: str, **more: Any) -> None:
        """One line of the file that all processes append to."""
        line = {"what": what, "rank": self.rank, "pid": os.getpid(), "time": time.time(), **more}
        with (self.home / "notes").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def first_time(self) -> bool:
        """Whether no rank of this job, restarted or not, has come to the fault before."""
        try:
            (self.home / "happened").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def is_due(self, phase: str) -> bool:
        wanted = self.fault.get("phase") == phase and self.mine
        at = phase == "evaluation" or self.step == self.fault.get("step")
        return wanted and at and self.first_time()

    def wrap(self, phase: str) -> None:
        """Let a phase note its seconds, and be where a signal or another fault strikes."""
        owner, name = PHASES[phase]
        function = getattr(owner, name)

        @functools.wraps(function)
        def wrapped(*arguments: Any, **options: Any) -> Any:
            strike = None
            if phase == "step":
                self.step = 1 + taken(*arguments[:2])
            if self.is_due(phase):
                delay = self.fault["delay"]
                self.note("fault", time=time.time() + delay)
                strike = signal_after(self.fault["signal"], delay)
            started = time.perf_counter()
            result = function(*arguments, **options)
            self.seconds.setdefault(phase, []).append(time.perf_counter() - started)
            if strike:  # the phase may be over before its time
                strike()
            if phase == "step":
                self.note("step", step=self.step)
                if self.mine and self.step >= self.fault.get("step", math.inf):
                    result = self.spoil(result)
            return result

        setattr(owner, name, wrapped)

    def spoil(self, loss: Tensor) -> Tensor:
        """What else can be wrong with a step."""
        kind = self.fault["kind"]
        if kind == "slow":
            time.sleep(self.fault["seconds"])
        if kind not in ("nan", "leave", "exit") or not self.first_time():
            return loss
        self.note("fault")
        if kind == "exit":
            os._exit(0)
        if kind == "leave":
            raise Left
        return loss * math.nan


def taken(model: nn.Module, optimizer: AdamW) -> int:
    """The steps before this one, those resumed included."""
    state = optimizer.state.get(next(model.parameters()))
    return int(state["step"]) if state else 0


def main() -> None:
    faulty = Faulty()
    faulty.note("start")
    for phase in PHASES:
        faulty.wrap(phase)
    kind = faulty.fault.get("kind")
    take_steps = train.Trainer.take_steps
    if kind == "options" and faulty.mine and faulty.first_time():
        faulty.note("fault")
        sys.argv += faulty.fault["options"]
    if kind == "limit":  # stands in for a full disk where none can be mounted
        resource.setrlimit(resource.RLIMIT_FSIZE, (faulty.fault["bytes"],) * 2)

    def take_steps_or_leave(trainer: train.Trainer) -> list[float]:
        try:
            return take_steps(trainer)
        except Left:
            return []

    train.Trainer.take_steps = take_steps_or_leave  # type: ignore[method-assign]

    def measured() -> int:
        code = train.main()
        faulty.note("end", code=code, seconds=faulty.seconds)
        return code

    run(measured)


if __name__ == "__main__":
    main()
