"""A probe stands around a function of torch and passes its calls on.

It calls the function with what it was given, and returns what it returns. An
error of the probe's own is noted, and the script goes on without it.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from miniddp.check.recorder import Recorder


def stand_around(
    owner: Any, name: str, around: Callable[..., Any], *arguments: Any
) -> None:
    """Let calls of `owner.name` go through `around(original, *arguments, …)`.

    A function of a module also where another module has imported it.
    """
    original = getattr(owner, name)

    recorder: Recorder = around.__self__.recorder  # type: ignore[attr-defined]

    @functools.wraps(original)
    def probe(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        call = Call(original)
        try:
            return around(call, *arguments, *args, **kwargs)
        except Exception as error:
            if call.has_raised:
                raise
            recorder.give_up(error)
            return call.result if call.is_over else original(*args, **kwargs)

    setattr(owner, name, probe)
    if isinstance(owner, type):
        return
    for module in list(sys.modules.values()):
        if vars(module).get(name) is original:
            setattr(module, name, probe)


class Call:
    """A call of the script's, whose own errors are told from a probe's."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.result: Any = None
        self.is_over = False
        self.has_raised = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.has_raised = True
        self.result = self.function(*args, **kwargs)
        self.has_raised = False
        self.is_over = True
        return self.result
