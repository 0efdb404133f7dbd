"""Ranks that are meant to fail or to wait for ever, and what is seen of them."""

import linecache
import re
from collections.abc import Callable
from typing import Any

from miniddp.launch import RanksFailed, RanksTimedOut, run_ranks


def hang_of(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float
) -> RanksTimedOut:
    """What `run_ranks` raises if the ranks have not ended after `timeout` seconds.

    Raises `AssertionError` if all end by themselves, `RanksFailed` if one fails.
    """
    try:
        run_ranks(fn, world_size, *args, timeout=timeout)
    except RanksTimedOut as error:
        return error
    raise AssertionError(
        f"all {world_size} ranks ended, where some should wait for ever"
    )


def failure_of(
    fn: Callable[..., Any], world_size: int, *args: Any, backend: str | None = "gloo"
) -> RanksFailed:
    """What `run_ranks` raises when a rank fails; `AssertionError` if none does."""
    try:
        run_ranks(fn, world_size, *args, backend=backend, timeout=300)
    except RanksFailed as error:
        return error
    raise AssertionError(f"all {world_size} ranks ended, where some should fail")


def last_line(text: str) -> str:
    """The last line of a traceback, the error's name without its module."""
    lines = [line for line in text.splitlines() if line.strip()]
    return re.sub(r"^(?:\w+\.)+(?=\w+Error)", "", lines[-1])


def error_of(traceback: str) -> str:
    """The error's whole text, of one line or several, without the frames before it."""
    return re.sub(r"(?s).*^(?:\w+\.)*(?=\w+Error)", "", traceback, flags=re.MULTILINE)


def functions_of(stack: str) -> list[str]:
    """The functions of a stack of `RanksTimedOut.stacks`, in the order of its lines."""
    return re.findall(r"line \d+,? in (\w+)", stack)


def lines_of(stack: str) -> list[str]:
    """The functions of a stack, each with the line that it is in, the innermost last.

    Only those of the program, nothing that is installed. Comments are left out.
    """
    found = []
    frames = re.findall(r'File "(.*)", line (\d+) in (\w+)', stack)
    for file, number, function in reversed(frames):
        if "site-packages" not in file:
            line = linecache.getline(file, int(number)).partition("  #")[0]
            found.append(f"{function}:\n  {line.strip()}")
    return found
