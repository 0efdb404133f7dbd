"""A probe stands around a function of torch and passes its calls on.

A probe is a generator: what it does before `yield` it does before the call,
and the rest after it, if the call has come back. Its own error is noted, and
the script goes on without it.
"""

import functools
import sys
from collections.abc import Callable, Generator
from typing import Any

import torch

from miniddp.check.recorder import Recorder

Notes = Generator[None, None, None]


class Call:
    """What a function is called with; then what it has returned."""

    def __init__(
        self, name: str, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> None:
        self.name = name
        self.args = args
        self.keywords = keywords
        self.result: Any = None
        self.error: BaseException | None = None

    def argument(self, position: int, name: str) -> Any:
        if position < len(self.args):
            return self.args[position]
        return self.keywords.get(name)


def stand_around(
    recorder: Recorder,
    owner: Any,
    name: str,
    probe: Callable[[Call], Notes],
) -> None:
    """Watch `owner.name`, of a module also where another has imported it."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def watched(*args: Any, **keywords: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **keywords)
        call = Call(name, args, keywords)
        notes = probe(call)
        go_on(notes, recorder)
        try:
            call.result = original(*call.args, **call.keywords)
        except BaseException as error:
            call.error = error
            recorder.break_off()
            notes.close()
            raise
        go_on(notes, recorder)
        return call.result

    setattr(owner, name, watched)
    if isinstance(owner, type):
        return
    for module in list(sys.modules.values()):
        if vars(module).get(name) is original:
            setattr(module, name, watched)


def go_on(notes: Notes, recorder: Recorder) -> None:
    try:
        next(notes, None)
    except Exception as error:
        recorder.give_up(error)
