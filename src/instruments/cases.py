"""Many measurements in one launch: to start ranks takes longer than what they do."""

import gc
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from miniddp.launch import run_ranks


def run_cases(
    measure: Callable[..., Any], world_size: int, cases: Sequence[Sequence[Any]]
) -> list[list[Any]]:
    """For each case, what `measure(rank, *case)` returns on each rank.

    The ranks take the cases one after the other, all in the same order, without warnings
    of libraries. What one case leaves in memory is collected before the next.
    """
    by_rank = run_ranks(_measure_all, world_size, measure, cases, timeout=600)
    return [list(ranks) for ranks in zip(*by_rank, strict=True)]


def _measure_all(
    rank: int, measure: Callable[..., Any], cases: Sequence[Sequence[Any]]
) -> list[Any]:
    warnings.simplefilter("ignore")
    found = []
    for case in cases:
        found.append(measure(rank, *case))
        gc.collect()
    return found
