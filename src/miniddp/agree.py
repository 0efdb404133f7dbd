"""Work that may fail on one rank: the error is raised on every rank.

Without that, the rank that failed would leave and the others would wait for it in vain.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

T = TypeVar("T")
Group = dist.ProcessGroup | None


def on_every_rank(
    work: Callable[[], T], error_type: type[Exception], group: Group = None, prefix: str = ""
) -> T:
    """The value of `work()` on this rank; if it raises on any rank, an `error_type` on all.

    Its message is one line: `prefix`, which rank failed unless all did alike, and the first error.
    """
    value, cause, problem = _attempt(work)
    problems: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(problems, problem, group=group)
    failed = [rank for rank, text in enumerate(problems) if text is not None]
    if failed:
        first = problems[failed[0]]
        where = "" if problems.count(first) == len(problems) else f"rank {failed[0]}: "
        raise error_type(f"{prefix}{where}{first}") from cause
    return cast(T, value)


def on_rank_0(
    work: Callable[[], T], error_type: type[Exception], group: Group = None, prefix: str = ""
) -> T:
    """Rank 0's value of `work()` on every rank; if it raises, an `error_type` on all."""
    outcome: list[Any] = [None, None]
    cause = None
    if dist.get_rank(group) == 0:
        value, cause, problem = _attempt(work)
        outcome = [value, problem]
    dist.broadcast_object_list(outcome, _first_rank(group), group=group)
    if outcome[1] is not None:
        raise error_type(prefix + outcome[1]) from cause
    return cast(T, outcome[0])


def gather(value: T, group: Group = None) -> list[T]:
    """The values of all ranks, on rank 0; on the others an empty list."""
    is_first = dist.get_rank(group) == 0
    values: list[Any] = [None] * dist.get_world_size(group) if is_first else []
    dist.gather_object(value, values if is_first else None, _first_rank(group), group=group)
    return values


def _attempt(work: Callable[[], T]) -> tuple[Any, Exception | None, str | None]:
    """The value, or the error and one line about it."""
    try:
        return work(), None, None
    except Exception as error:
        text = error.strerror if isinstance(error, OSError) else None
        return None, error, " ".join((text or str(error) or type(error).__name__).split())


def _first_rank(group: Group) -> int:
    return dist.get_process_group_ranks(group or dist.group.WORLD)[0]
