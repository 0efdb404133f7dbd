import pytest
from hypothesis import given
from hypothesis import strategies as st

from instruments import sharding
from miniddp.sampler import DistributedSampler


def test_indices_stand_rank_after_rank():
    assert sharding.of_all_ranks(3, lambda rank: [rank, 10 + rank]) == [0, 10, 1, 11, 2, 12]


def test_strided_shards_join_the_batches_of_one_process_and_blocks_do_not():
    assert sharding.steps_like_one_process(100, 4, 6, contiguous=False) == (4, 4)
    assert sharding.steps_like_one_process(100, 4, 6, contiguous=True) == (0, 4)
    assert sharding.steps_like_one_process(24, 4, 6, contiguous=True) == (1, 1)


def test_the_samplers_are_compared_once_for_each_rank_and_case(monkeypatch):
    # Dropping, three samples leave two ranks one each: both ways to shuffle, 2 seeds, 3 epochs.
    assert sharding.compare_with_torch([3], [2]) == 2 * 2 * 2 * 2 * 3
    assert sharding.compare_with_torch([1], [2]) == 2 * 2 * 2 * 3
    other = sharding.TorchSampler
    monkeypatch.setattr(sharding, "TorchSampler", lambda data, *options: other(range(4), *options))
    with pytest.raises(AssertionError):
        sharding.compare_with_torch([3], [2])


def test_a_sample_can_be_read_never_once_and_twice():
    assert sharding.read_never_and_twice(4, [0, 1, 1, 2]) == (0.25, 0.25)
    assert sharding.read_never_and_twice(4, [0, 0, 0, 0]) == (0.75, 0.25)


@given(st.lists(st.floats(-10, 10), min_size=1), st.integers(1, 8))
def test_sums_and_counts_are_exact_on_any_number_of_ranks(values, world_size):
    assert sharding.mean_of_sums(values, world_size) == sharding.mean(values)


def test_repeats_and_unequal_shards_are_not():
    values = [0.0, 6.0, 12.0, 18.0]
    assert sharding.mean(values) == 9
    assert sharding.mean_with_repeats(values, 3) == 7  # 0 and 6 count twice
    assert sharding.mean_of_means(values, 3) == 9  # 9, 6 and 12: by luck
    assert sharding.mean_of_means([6.0, 0.0, 0.0, 0.0], 3) == 1  # 3, 0 and 0
    assert sharding.mean_with_repeats(values, 2) == sharding.mean_of_means(values, 2) == 9


def test_padding_counts_the_tokens_of_each_batch_by_itself():
    assert sharding.padding_share([4, 8, 8, 8], 2, 1) == pytest.approx(100 * 4 / 32)
    assert sharding.padding_share([4, 8, 3], 2, 1) == pytest.approx(100 * 4 / 19)
    assert sharding.padding_share([4, 8, 3], 2, 8) == pytest.approx(100 * 9 / 24)
    assert sharding.padding_share([5, 1, 7], 1, 1) == 0


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_interrupted_epoch(world_size):
    def load(sampler: DistributedSampler, state: dict) -> list[int]:
        sampler.load_state_dict(state)
        return list(sampler)

    def begin_again(sampler: DistributedSampler, state: dict) -> list[int]:
        return list(sampler)[: len(sampler) - state["consumed"]]

    assert sharding.times_read(12, world_size, 2, load) == (0, 12, 0)
    twice = 2 * world_size
    assert sharding.times_read(12, world_size, 2, begin_again) == (twice, 12 - 2 * twice, twice)
