"""Succeed on every rank or fail on every rank.

A rank that fails alone leaves, and the others wait for it in vain. So work
that may fail goes through one of these: an error of one is raised on all.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")
Group = dist.ProcessGroup | None
Error = type[Exception]


def succeed_together(
    work: Callable[[], T], kind: Error, group: Group = None, where: str = ""
) -> T:
    """This rank's `work()`; if it raises on any rank, a `kind` on all.

    The message is one line: `where`, the lowest rank that failed unless all
    did alike, and its error.
    """
    value, error, line = _attempt(work)
    lines: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(lines, line, group=group)
    for rank, line in enumerate(lines):
        if line:
            who = "" if set(lines) == {line} else f"rank {rank}: "
            raise kind(where + who + line) from error
    return value  # type: ignore[no-any-return]


def from_rank_0(
    work: Callable[[], T], kind: Error, group: Group = None, where: str = ""
) -> T:
    """Rank 0's `work()` on every rank; if it raises, a `kind` on all."""
    value, error, line = None, None, ""
    if dist.get_rank(group) == 0:
        value, error, line = _attempt(work)
    outcome: list[Any] = [value, line]
    dist.broadcast_object_list(outcome, first_rank(group), group=group)
    if outcome[1]:
        raise kind(where + outcome[1]) from error
    return outcome[0]  # type: ignore[no-any-return]


def first_rank(group: Group) -> int:
    """The global number of the group's rank 0."""
    return dist.get_process_group_ranks(group or dist.group.WORLD)[0]


def _attempt(work: Callable[[], T]) -> tuple[Any, Exception | None, str]:
    """The value, or the error and one line about it."""
    try:
        return work(), None, ""
    except Exception as error:
        text = error.strerror if isinstance(error, OSError) else None
        words = (text or str(error)).split() or [type(error).__name__]
        return None, error, " ".join(words)
