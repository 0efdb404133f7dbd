"""Clocks that wait for the device: a GPU is still at work when Python has gone on."""

import time
from typing import Any

import torch
import torch.distributed as dist

from miniddp.process import device


def clock() -> float:
    """Seconds, read once this rank's device has done all it was given."""
    if device().type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def slowest(seconds: float) -> float:
    """The largest of what the ranks pass: a step ends with its slowest rank.

    Every rank of the default process group has to call it.
    """
    longest = torch.tensor(seconds, dtype=torch.float64, device=device())
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.item()


def now() -> Any:
    """This moment of this rank's device, without waiting for it."""
    if device().type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(start: Any, end: Any) -> float:
    """Seconds between two moments of `now`; on a GPU it waits for the second."""
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000
