"""Clocks that wait for the device: a GPU is still at work when Python has gone on."""

import time
from typing import Any

import torch
from torch import Tensor, nn

from miniddp.process import device


def clock() -> float:
    """Seconds, read once this rank's device has done all it was given."""
    if device().type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


class SyncClock:
    """How long a rank waits for the averaged gradients when its own are complete.

    That is what synchronisation costs: what is sent while backward still computes costs nothing.
    Make it before the module is wrapped, so that its hooks are the first to see a gradient.
    """

    def __init__(self, module: nn.Module) -> None:
        self._last_gradient: Any = None
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._mark)  # type: ignore[no-untyped-call]

    def _mark(self, _: Tensor) -> None:
        self._last_gradient = now()

    def seconds(self) -> float:
        """Seconds since the last gradient; call it when the gradients are averaged."""
        return seconds_between(self._last_gradient, now())


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
