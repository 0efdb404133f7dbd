"""When `exercises/03_sharding.py` is right: full, disjoint, equal batches with little padding."""

import random
from itertools import chain

import pytest
from harness import load

exercise = load("03_sharding")
LENGTHS = [random.Random(i).randint(20, 120) for i in range(1003)]
CASES = [(1, 8), (2, 8), (3, 5), (4, 16)]  # world size, batch size
Batches = list[list[int]]


def plan(world_size: int, batch_size: int, epoch: int = 0, seed: int = 0) -> list[Batches]:
    """The batches of every rank."""
    return [
        exercise.batches_of_rank(LENGTHS, batch_size, world_size, rank, seed, epoch)
        for rank in range(world_size)
    ]


def samples(ranks: list[Batches]) -> list[int]:
    return [sample for batches in ranks for batch in batches for sample in batch]


def longest(batch: list[int]) -> int:
    return max(LENGTHS[i] for i in batch)


def padding(batches: Batches) -> int:
    """Tokens of padding, each batch padded to its longest sample."""
    return sum(longest(batch) - LENGTHS[i] for batch in batches for i in batch)


@pytest.mark.parametrize(("world_size", "batch_size"), CASES)
def test_all_ranks_take_the_same_number_of_full_batches(world_size: int, batch_size: int) -> None:
    steps = len(LENGTHS) // (world_size * batch_size)
    for rank, batches in enumerate(plan(world_size, batch_size)):
        assert len(batches) == steps, f"rank {rank} has {len(batches)} batches, expected {steps}"
        assert {len(batch) for batch in batches} == {batch_size}


@pytest.mark.parametrize(("world_size", "batch_size"), CASES)
def test_no_sample_comes_twice(world_size: int, batch_size: int) -> None:
    read = samples(plan(world_size, batch_size))
    again = len(read) - len(set(read))
    assert again == 0, f"of {len(read)} samples in an epoch {again} had come before"
    assert set(read) <= set(range(len(LENGTHS)))


def test_what_is_left_out_changes_with_the_epoch() -> None:
    left_out = [set(range(len(LENGTHS))) - set(samples(plan(4, 16, epoch))) for epoch in range(20)]
    assert {len(indices) for indices in left_out} == {len(LENGTHS) % 64}
    never = set.intersection(*left_out)
    assert not never, f"{len(never)} samples are left out of each of 20 epochs"
    ordinary = sorted(LENGTHS)[len(LENGTHS) * 9 // 10]
    shortest = min(LENGTHS[i] for i in chain(*left_out))
    assert shortest < ordinary, "only the longest samples are left out"


def test_the_plan_depends_on_seed_and_epoch_alone() -> None:
    assert plan(2, 8) == plan(2, 8), "two calls with equal arguments have two plans"
    assert plan(2, 8, epoch=0) != plan(2, 8, epoch=1), "two epochs have one plan"
    assert plan(2, 8, seed=0) != plan(2, 8, seed=50), "two seeds have one plan"


@pytest.mark.parametrize(("world_size", "batch_size"), CASES)
def test_there_is_little_padding(world_size: int, batch_size: int) -> None:
    order = list(range(len(LENGTHS)))
    random.Random(0).shuffle(order)
    at_random = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    in_all = sum(padding(batches) for batches in plan(world_size, batch_size))
    unsorted = padding(at_random)
    assert in_all < 0.2 * unsorted, f"{in_all} tokens of padding, and {unsorted} in random order"


@pytest.mark.parametrize(("world_size", "batch_size"), CASES[1:])
def test_the_ranks_have_similar_lengths_in_each_step(world_size: int, batch_size: int) -> None:
    for step in zip(*plan(world_size, batch_size), strict=True):
        widths = [longest(batch) for batch in step]
        assert max(widths) - min(widths) <= 20, f"the ranks have batches of {widths} tokens"


def test_short_and_long_batches_take_turns() -> None:
    widths = [longest(batch) for batch in plan(2, 8)[0]]
    half = len(widths) // 2
    early, late = sum(widths[:half]) / half, sum(widths[-half:]) / half
    assert abs(early - late) < 25, "the batches are sorted by length"
    assert widths not in (sorted(widths), sorted(widths)[::-1])
