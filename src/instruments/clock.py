"""Clocks that wait for the device: a GPU is still at work when Python has gone on."""

import time
from typing import Any

import torch

from miniddp.process import device


def clock() -> float:
    """Seconds, read once this rank's device has done all it was given."""
    if device().type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def now() -> Any:
    """This moment of this rank's device, without waiting for it."""
    if device().type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def seconds_between(start: Any, end: Any) -> float:
    """Seconds between two moments of `now`; on a GPU it waits for the second."""
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000
