from itertools import chain

import datasets
import pytest

from instruments.streams import (
    Numbers,
    SharedNumbers,
    part_of,
    read_and_resume,
    read_with_two_workers,
    samples_in,
    stream_of,
    while_all_have_one,
)
from miniddp import run_ranks


def test_workers_that_do_not_share_read_everything_twice():
    assert sorted(read_with_two_workers(Numbers())) == sorted([*range(6), *range(6)])
    shared = [read_with_two_workers(SharedNumbers(2, rank)) for rank in range(2)]
    assert [sorted(read) for read in shared] == [[0, 1, 4, 5], [2, 3]]
    assert [list(SharedNumbers(4, rank)) for rank in range(4)] == [[0, 4], [1, 5], [2], [3]]


def test_all_ranks_stop_with_the_first_that_has_nothing_left():
    def read(rank: int) -> list[int]:
        return list(while_all_have_one(range(10 * rank, 10 * rank + 3 + rank)))

    assert run_ranks(read, 2) == [[0, 1, 2], [10, 11, 12]]


@pytest.mark.parametrize("files", [1, 3, 4])
def test_two_parts_hold_every_sample_once(files):
    parts = [samples_in(part_of(stream_of(files), rank)) for rank in range(2)]
    assert sorted(chain(*parts)) == list(range(4 * files))


def test_what_is_opened_is_noted_also_where_a_part_skips_it():
    opened = []
    assert samples_in(part_of(stream_of(2, opened), 1)) == [4, 5, 6, 7]
    assert opened == [1]
    opened.clear()
    assert samples_in(part_of(stream_of(1, opened), 1)) == [1, 3]
    assert opened == [0]


def test_a_resume_needs_the_epoch_of_the_state():
    datasets.logging.set_verbosity_error()
    whole = samples_in(part_of(stream_of(4), 0))
    before, after = read_and_resume(stream_of(4), epoch=1, told=1)
    assert (len(before), before + after) == (3, whole)
    before, after = read_and_resume(stream_of(4), epoch=1, told=0)
    assert after == whole
