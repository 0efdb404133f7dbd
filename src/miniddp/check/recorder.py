"""Notes of one rank: what happened, at which line, and where it is now."""

import functools
import site
import sys
import sysconfig
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from miniddp.check.finding import Event

SAMPLED = 1024
"""At most so many elements of a tensor are compared, evenly spread."""
COMPUTING = ("the forward pass", "the data loader")
"""What takes a rank's own time, though it may wait in it too."""
PACKAGE = str(Path(__file__).parents[1])
NOT_THE_USERS = (
    str(Path(torch.__file__).parent),
    PACKAGE,
    sysconfig.get_path("stdlib"),
    *site.getsitepackages(),
    "<frozen",
)


class Recorder:
    """The events of this rank; its probes write, its exchange reads."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.step = 0
        self.events: list[Event] = []
        self.is_watching = True
        self.ranks: tuple[int, ...] = ()
        self.place: Event = {}
        """The call that may wait for other ranks in which this one is."""
        self.broken_place: Event = {}
        """The call that has raised, if one has."""
        self.calls = 0
        """How many such calls it has begun."""
        self.free_since = time.monotonic()
        """When its step has ended, later by what it has waited since."""

    def note(self, kind: str, **facts: Any) -> Event:
        event: Event = {"kind": kind, "step": self.step, **facts}
        self.events.append(event)
        return event

    @contextmanager
    def inside(self, operation: str, **facts: Any) -> Iterator[None]:
        """Where this rank is, if it does not come out again."""
        before = self.place
        self.calls += 1
        self.place = {
            "operation": operation,
            "calls": self.calls,
            "since": time.monotonic(),
            **facts,
        }
        try:
            yield
        except BaseException:
            if not self.broken_place:
                self.broken_place = {**self.place, "line": user_line()}
            raise
        finally:
            if operation not in COMPUTING and not before:
                self.free_since += time.monotonic() - self.place["since"]
            self.place = before

    def give_up(self, error: Exception) -> None:
        """The watcher has failed: the script goes on without it."""
        self.is_watching = False
        self.note("failure", line="", error=repr(error))

    def end_step(self) -> None:
        self.step += 1
        self.free_since = time.monotonic()
        if self.step >= self.steps:
            self.is_watching = False


class Sample:
    """Some elements of each of the tensors, as they are now.

    The exchange's thread turns them into digests, not the script's.
    """

    def __init__(self, names: Iterable[str], tensors: Iterable[Tensor]) -> None:
        self.names = list(names)
        pieces = [spread_out(tensor) for tensor in tensors]
        self.lengths = [len(piece) for piece in pieces]
        self.values = torch.cat(pieces) if pieces else torch.empty(0)

    def digests(self) -> dict[str, int]:
        data = to_bytes(self.values)
        size = self.values.element_size()
        begin = 0
        digests = {}
        for name, length in zip(self.names, self.lengths, strict=True):
            end = begin + length * size
            digests[name] = zlib.crc32(data[begin:end])
            begin = end
        return digests


class Rows:
    """Some elements of each sample of a batch; a digest for each."""

    def __init__(self, batch: Tensor) -> None:
        flat = batch.detach().reshape(len(batch), -1)
        stride = max(1, flat.shape[1] // 64)
        self.values = flat[:, ::stride].clone()

    def digests(self) -> list[int]:
        data = to_bytes(self.values)
        size = len(data) // max(1, len(self.values))
        return [
            zlib.crc32(data[begin : begin + size])
            for begin in range(0, len(data), max(1, size))
        ]


def spread_out(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if flat.numel() <= SAMPLED:
        return flat
    return flat[:: flat.numel() // SAMPLED | 1]


def to_bytes(values: Tensor) -> memoryview:
    flat = values.cpu().contiguous().reshape(-1)
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


def is_whole(parameter: Tensor) -> bool:
    """Not a part, as FSDP holds it, and not of a lazy module."""
    is_part = hasattr(parameter, "placements")
    is_part = is_part or hasattr(parameter, "_is_flat_param")
    is_part = is_part or hasattr(parameter, "_fsdp_flattened")
    is_lazy = torch.nn.parameter.is_lazy(parameter)
    return not is_part and not is_lazy and parameter.layout == torch.strided


def user_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of the user's own files, the innermost first."""
    while frame is not None:
        if not frame.f_code.co_filename.startswith(NOT_THE_USERS):
            yield frame
        frame = frame.f_back


def user_line() -> str:
    """`train.py:31`, where the script called what is being noted."""
    for frame in user_frames(sys._getframe(1)):
        return line_of(frame)
    return ""


def line_of(frame: FrameType) -> str:
    return f"{short(frame.f_code.co_filename)}:{frame.f_lineno}"


@functools.cache
def short(file: str) -> str:
    path = Path(file)
    is_below = path.is_relative_to(Path.cwd())
    return str(path.relative_to(Path.cwd()) if is_below else path)
