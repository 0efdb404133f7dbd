"""When `exercises/10_profile.py` is right: against counted seconds, and on real traces."""

import random
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import load

from instruments.profiling import Profiler, Schedule
from instruments.trace import Trace, read_trace
from miniddp import run_ranks

exercise = load("10_profile")


@pytest.mark.parametrize(
    ("messages", "work", "expected"),
    [
        ([], [], 0),
        ([(1, 3)], [], 2),
        ([], [(1, 3)], 0),
        ([(1, 5)], [(0, 2)], 3),
        ([(1, 5)], [(2, 3)], 3),
        ([(1, 5)], [(0, 6)], 0),
        ([(4, 6), (1, 5)], [(5, 9)], 4),
        ([(1, 2), (1, 2)], [], 1),
        ([(0, 10)], [(1, 3), (2, 4), (8, 9)], 6),
    ],
)
def test_worked_examples(messages, work, expected) -> None:
    assert exercise.exposed_seconds(messages, work) == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(20))
def test_against_counted_seconds(seed: int) -> None:
    draw = random.Random(seed)

    def intervals() -> list[tuple[float, float]]:
        starts = [draw.randrange(20) for _ in range(draw.randrange(6))]
        return [(float(start), float(start + draw.randrange(1, 6))) for start in starts]

    def seconds(pairs) -> set[int]:
        return {second for start, end in pairs for second in range(int(start), int(end))}

    messages, work = intervals(), intervals()
    expected = len(seconds(messages) - seconds(work))
    assert exercise.exposed_seconds(messages, work) == pytest.approx(expected)


def train(rank: int, folder: Path, late: int) -> Trace:
    """Two steps; one rank comes late to the all-reduce of each."""
    with Profiler(folder, Schedule(0, 0, 1, 2), all_ranks=True) as profiler:
        for _ in range(3):
            if rank == late:
                time.sleep(0.4)
            dist.all_reduce(torch.ones(4))
            profiler.step()
    return read_trace(profiler.traces[0])


@pytest.mark.parametrize("late", [0, 2])
def test_the_late_rank_is_found(tmp_path: Path, late: int) -> None:
    traces = list(run_ranks(train, 3, tmp_path, late, timeout=60))
    assert exercise.late_rank(traces) == late, "the late rank waits least for the others"
    assert exercise.late_rank(traces[::-1]) == late, "`traces` may be in another order"
