"""What torch.profiler records, and what that costs a step."""

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from instruments.breakdown import recorded_steps
from instruments.trace import Trace, read_trace


def steps_in_traces(repeat: int, steps: int) -> list[list[int]]:
    """The steps in each trace that torch makes of a training of so many steps.

    The schedule skips five, waits for one, warms up in two and records five.
    """
    found = []

    def keep(recording: profile) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            recording.export_chrome_trace(str(path))
            found.append(steps_with_work(read_trace(path)))

    schedule = torch.profiler.schedule(
        skip_first=5, wait=1, warmup=2, active=5, repeat=repeat
    )
    _train(steps, schedule=schedule, on_trace_ready=keep)
    return found


def steps_with_work(trace: Trace) -> list[int]:
    """The numbers of the steps in which the process computed a sum."""
    sums = [event for event in trace.events if event.name == "aten::sum"]
    found = []
    for step in recorded_steps(trace):
        if any(step.start <= event.start < step.end for event in sums):
            found.append(int(step.name.removeprefix("ProfilerStep#")))
    return found


def steps_kept(acc_events: bool) -> int:
    """How many steps `events()` holds after a training with two cycles of two."""
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=2)
    profiler = _train(8, schedule=schedule, acc_events=acc_events)
    names = [event.name for event in profiler.events()]
    return sum(name.startswith("ProfilerStep") for name in names)


def traces_without_step() -> int:
    """How many traces a loop makes that never calls `step()`."""
    traces: list[profile] = []
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule,
        on_trace_ready=traces.append,
    ):
        for _ in range(10):
            torch.ones(8).sum()
    return len(traces)


def _train(steps: int, **options: Any) -> profile:
    """Compute a sum in each step, under the profiler with these options."""
    profiler = profile(activities=[ProfilerActivity.CPU], **options)
    with profiler:
        for _ in range(steps):
            torch.ones(8).sum()
            profiler.step()
    return profiler


# What it costs


@dataclass(frozen=True)
class Cost:
    """A step under the profiler.

    Attributes:
        ratio: Its processor time over that of a step without one.
        recording: That of the last round.
    """

    ratio: float
    recording: profile


def costs_of(
    step: Callable[[], object],
    settings: Mapping[str, Mapping[str, Any]],
    rounds: int,
    active: int,
) -> dict[str, Cost]:
    """Take `active` steps with each of the settings of `profile`, which take turns.

    Processor time is that of all threads of the process, and does not count what other
    programs use. The ratio is that of two medians.
    """
    processor_seconds(step, active, None)
    without = []
    seconds: dict[str, list[float]] = {name: [] for name in settings}
    recordings = {}
    for _ in range(rounds):
        without.append(processor_seconds(step, active, None))
        for name, parameters in settings.items():
            # One step more than are taken: the work at the end of a cycle is not timed.
            schedule = torch.profiler.schedule(
                wait=0, warmup=1, active=active + 1, repeat=1
            )
            with profile(schedule=schedule, **parameters) as profiler:
                seconds[name].append(processor_seconds(step, active, profiler))
            recordings[name] = profiler
    plain = statistics.median(without)
    return {
        name: Cost(statistics.median(seconds[name]) / plain, recordings[name])
        for name in settings
    }


def processor_seconds(
    step: Callable[[], object], active: int, profiler: profile | None
) -> float:
    """Processor time of one of `active` steps, after one that warms up."""

    def take() -> None:
        step()
        if profiler is not None:
            profiler.step()

    take()
    start = time.process_time()
    for _ in range(active):
        take()
    return (time.process_time() - start) / active
