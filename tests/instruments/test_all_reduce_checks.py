from unittest import mock

import pytest
import torch

from instruments.all_reduce_checks import DATA, largest_difference, passes
from miniddp import ring, run_ranks
from miniddp.launch import RanksFailed


def turned_round(rank: int, size: int) -> list[tuple[int, int]]:
    return [((rank + step) % size, (rank + step + 1) % size) for step in range(size - 1)]


def test_only_random_data_on_three_ranks_show_a_chunk_in_the_wrong_place():
    assert list(DATA) == ["ones", "the rank's number", "random"]
    assert run_ranks(passes, 3) == [[True] * 3] * 3
    wrong = run_ranks(passes, 3, turned_round)
    assert [all(verdicts) for verdicts in zip(*wrong, strict=True)] == [True, True, False]
    assert run_ranks(passes, 2, turned_round) == [[True] * 3] * 2


def difference_of_a_broken_ring(rank: int, wrong_on: int) -> float:
    def broken(tensor: torch.Tensor) -> None:
        torch.distributed.all_reduce(tensor)
        if wrong_on in (rank, -1) and len(tensor):
            tensor[-1] += 0.5

    with mock.patch.object(ring, "all_reduce", broken):
        return largest_difference(rank, [0, 1, 7])


def test_the_largest_difference_is_of_any_element():
    assert max(run_ranks(largest_difference, 2, [0, 1, 1000])) < 1e-5
    assert run_ranks(difference_of_a_broken_ring, 2, -1) == pytest.approx([0.5, 0.5])


def test_other_bits_on_one_rank_are_an_error():
    with pytest.raises(RanksFailed, match="other bits than rank 0, length 1"):
        run_ranks(difference_of_a_broken_ring, 2, 1)
