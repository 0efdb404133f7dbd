import pytest
import torch
import torch.distributed as dist

from instruments.failures import (
    error_of,
    failure_of,
    functions_of,
    hang_of,
    last_line,
    lines_of,
)
from miniddp.launch import RanksFailed


def asks_on_rank_0(rank: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(1))
    dist.barrier()  # for ever


def ends(rank: int) -> None:
    print(rank)


def fails(rank: int) -> None:
    raise ValueError(f"no label for {rank}")


def test_a_hang_says_where_each_rank_was():
    hang = hang_of(asks_on_rank_0, 2, timeout=3)
    found = [functions_of(hang.stacks[rank]) for rank in range(2)]
    assert found[0].index("all_reduce") < found[0].index("asks_on_rank_0")
    assert "barrier" not in found[0]
    assert found[1].index("barrier") < found[1].index("asks_on_rank_0")


def test_a_failure_has_each_ranks_error():
    failure = failure_of(fails, 2, backend=None)
    lines = {rank: last_line(text) for rank, text in failure.tracebacks.items()}
    assert lines == {rank: f"ValueError: no label for {rank}" for rank in range(2)}


@pytest.mark.parametrize("expected", [failure_of, lambda *call: hang_of(*call, timeout=30)])
def test_ranks_that_end_are_no_failure(expected):
    with pytest.raises(AssertionError, match="all 2 ranks ended"):
        expected(ends, 2)


def test_a_failure_is_no_hang():
    with pytest.raises(RanksFailed):
        hang_of(fails, 2, timeout=30)


def test_the_last_line_has_no_module_before_the_error():
    text = "Traceback …\ntorch.distributed.DistStoreError: Timed out after a.b seconds\n\n"
    assert last_line(text) == "DistStoreError: Timed out after a.b seconds"
    assert last_line("plain words") == "plain words"


def test_an_error_of_several_lines_is_whole():
    text = "Traceback …\n  File …\nx.KeyError: 1\n\nDuring …\na.RuntimeError: one\n\ttwo\nthree"
    assert error_of(text) == "RuntimeError: one\n\ttwo\nthree"
    assert error_of("was killed by SIGKILL") == "was killed by SIGKILL"


def test_a_hang_says_in_which_lines_of_the_program_each_rank_was():
    hang = hang_of(asks_on_rank_0, 2, timeout=3)
    assert lines_of(hang.stacks[0]) == ["asks_on_rank_0:\n  dist.all_reduce(torch.ones(1))"]
    assert lines_of(hang.stacks[1]) == ["asks_on_rank_0:\n  dist.barrier()"]


def waits_for_rank_1(rank: int) -> None:
    asks_on_rank_0(rank)


def test_the_innermost_line_stands_last():
    hang = hang_of(waits_for_rank_1, 2, timeout=3)
    functions = [line.partition(":")[0] for line in lines_of(hang.stacks[1])]
    assert functions == ["waits_for_rank_1", "asks_on_rank_0"]
