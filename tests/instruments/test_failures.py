import pytest
import torch
import torch.distributed as dist

from instruments.failures import failure_of, functions_of, hang_of, last_line
from miniddp.launch import RanksFailed


def asks_on_rank_0(rank: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(1))
    dist.barrier()


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
