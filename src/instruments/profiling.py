"""Record a few training steps with torch.profiler: when, what, and into which file.

    with Profiler("traces") as profiler:
        for batch in loader:
            with region("forward"):
                loss = model(batch)
            ...
            profiler.step()

`instruments.trace` reads the files. TensorBoard's plugin finds them too.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

REGIONS = ("data_movement", "forward", "backward", "sync_grads", "opt_step")
"""The regions of a training step in this book."""

Phase = Literal["skip", "wait", "warmup", "record", "done"]
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Schedule:
    """Which steps are recorded: `torch.profiler.schedule`, as data.

    The first `skip_first` steps are skipped. Then a cycle waits, warms up (the
    profiler runs, its events are thrown away) and records `active` steps. `repeat` is
    the number of cycles, not of
    repetitions: 1 records once, 0 goes on to the end. With the defaults steps 8 to 12
        are recorded,
    counted from 0, and nothing after them.
    """

    skip_first: int = 5
    wait: int = 1
    warmup: int = 2
    active: int = 5
    repeat: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 1 if name == "active" else 0
            if not isinstance(value, int) or value < least:
                raise ValueError(
                    f"{name} must be an integer of at least {least}, not {value!r}"
                )

    def phase(self, step: int) -> Phase:
        """What the profiler does in a step; steps count from 0."""
        if step < self.skip_first:
            return "skip"
        length = self.wait + self.warmup + self.active
        cycle, step_of_cycle = divmod(step - self.skip_first, length)
        if self.repeat and cycle >= self.repeat:
            return "done"
        if step_of_cycle < self.wait:
            return "wait"
        if step_of_cycle < self.wait + self.warmup:
            return "warmup"
        return "record"

    def recorded(self, steps: int) -> list[int]:
        """The steps, out of a training of so many, that are recorded."""
        return [step for step in range(steps) if self.phase(step) == "record"]

    def to_torch(self) -> Callable[[int], ProfilerAction]:
        """The `schedule` argument of `torch.profiler.profile`."""
        return torch.profiler.schedule(**vars(self))


class Profiler:
    """`torch.profiler.profile` for a loop that says `step()` after each training step.

    Each cycle of the schedule becomes a file `rank0.<next step>.pt.trace.json.gz` in
    `folder`; `traces` lists those of this rank. Rank 0 alone records, or `all_ranks`,
    each its own file. `record_shapes`, `profile_memory`, `with_stack` and `with_flops`
    are torch's. A trace that cannot be written is an error in the log: training goes
    on.

    Raises `OSError` on every rank if the folder cannot be made.
    """

    def __init__(
        self,
        folder: str | Path,
        schedule: Schedule | None = None,
        all_ranks: bool = False,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        with_flops: bool = False,
    ) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.schedule = schedule or Schedule()
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.traces: list[Path] = []
        self._profile: Any = None
        if self.rank == 0 or all_ranks:
            self._profile = profile(
                activities=_activities(),
                schedule=self.schedule.to_torch(),
                on_trace_ready=self._write,
                record_shapes=record_shapes,
                profile_memory=profile_memory,
                with_stack=with_stack,
                with_flops=with_flops,
            )

    def __enter__(self) -> "Profiler":
        if self._profile is not None:
            self._profile.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._profile is None:
            return
        steps = self._profile.step_num
        self._profile.__exit__(kind, error, traceback)
        if not self.schedule.recorded(steps):
            begin = self.schedule.skip_first + self.schedule.wait + self.schedule.warmup
            logger.warning(
                "no step was profiled: training ended after %d, recording would have "
                "begun after %d (skip_first + wait + warmup)",
                steps,
                begin,
            )

    def step(self) -> None:
        """Say that a training step has ended."""
        if self._profile is not None:
            self._profile.step()

    def _write(self, recording: Any) -> None:
        name = f"rank{self.rank}.{recording.step_num}.pt.trace.json.gz"
        unfinished = self.folder / f"unfinished.{name}"
        try:
            recording.export_chrome_trace(str(unfinished))
            self.traces.append(unfinished.replace(self.folder / name))
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            logger.error(
                "cannot write the trace %s: %s", self.folder / name, error.strerror
            )


def _activities() -> list[ProfilerActivity]:
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    return activities


def region(name: str) -> record_function:
    """A context whose time shows in a trace under `name`, such as one of `REGIONS`.

    Raises `ValueError` unless the name is an identifier: `instruments.trace` tells
    regions from torch's own annotations by that.
    """
    if not name.isidentifier():
        raise ValueError(f"the name of a region must be an identifier, not {name!r}")
    return record_function(name)
