"""Notes of one rank: what happened, at which line, and where it is now."""

import functools
import os
import site
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from miniddp.check.finding import Event

COMPUTING = ("the forward pass", "the data loader")
"""What takes a rank's own time, though it may wait in it too."""
NOT_THE_USERS = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parents[1]),
    sysconfig.get_path("stdlib"),
    *site.getsitepackages(),
    "<frozen",
)


class Recorder:
    """The events of this rank; its probes write, its exchange reads."""

    def __init__(self, steps: int | None, epochs: int | None) -> None:
        self.steps = steps
        self.epochs = epochs
        self.step = 0
        self.events: list[Event] = []
        self.is_watching = True
        self.ranks: tuple[int, ...] = ()
        self.place: Event = {}
        """The call that may wait for other ranks in which this one is."""
        self.broken_place: Event = {}
        """The last such call that has raised."""
        self.free_since = time.monotonic()
        """When its step has ended, later by what it has waited since."""

    def note(self, kind: str, **facts: Any) -> Event:
        event: Event = {"kind": kind, "step": self.step, **facts}
        self.events.append(event)
        return event

    @contextmanager
    def inside(
        self, operation: str, group: str | None, shape: str | None = None
    ) -> Iterator[None]:
        """Where this rank is, if it does not come out again.

        It waits for the ranks of `group`, `""` for all, or if None for nobody.
        """
        before = self.place
        since = time.monotonic()
        self.place = {"operation": operation, "group": group, "shape": shape}
        try:
            yield
        finally:
            if operation not in COMPUTING and not before:
                self.free_since += time.monotonic() - since
            self.place = before

    def break_off(self) -> None:
        """The call in which this rank is has raised."""
        if self.place.get("group") is not None:
            self.broken_place = {**self.place, "line": user_line()}

    def give_up(self, error: Exception) -> None:
        """The watcher has failed: the script goes on without it."""
        self.is_watching = False
        self.note("failure", line="", error=repr(error))

    def end_step(self) -> None:
        self.step += 1
        self.free_since = time.monotonic()
        if self.step == self.steps:
            self.is_watching = False


def user_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of the user's own files, the innermost first."""
    while frame is not None:
        if is_the_users(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def user_line() -> str:
    """`train.py:31`, where the script called what is being noted."""
    for frame in user_frames(sys._getframe(1)):
        return line_of(frame)
    return ""


def user_path() -> str:
    """The lines that lead to what is being noted, the innermost first."""
    return " < ".join(map(line_of, user_frames(sys._getframe(1))))


def line_of(frame: FrameType) -> str:
    return f"{short(frame.f_code.co_filename)}:{frame.f_lineno}"


@functools.cache
def is_the_users(file: str) -> bool:
    return not file.startswith(NOT_THE_USERS)


@functools.cache
def short(file: str) -> str:
    return os.path.relpath(file) if file.startswith(os.getcwd()) else file
