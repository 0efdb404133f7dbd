"""When `exercises/11_scaling.py` is right: on paper, and compared with miniddp's own model."""

import random

import pytest
from harness import load

from instruments.cost import Link, ring_all_reduce_seconds
from instruments.simulator import even_layers, simulate

exercise = load("11_scaling")
MEGABYTE = 10**6


def expected(forward, backward, bucket_bytes, world_size, alpha, beta):
    link = Link(alpha, beta)
    step = simulate(
        even_layers(bucket_bytes, forward, backward),
        lambda size: ring_all_reduce_seconds(size, world_size, link),
    )
    return step.compute / step.seconds


def test_one_rank_waits_for_nobody() -> None:
    assert exercise.efficiency(1.0, 2.0, [MEGABYTE, MEGABYTE], 1, 0.5, 1e-6) == 1


def test_one_bucket_is_sent_after_backward() -> None:
    """Two ranks: two sends of half a megabyte at 1 us per byte, after 3 s of compute."""
    found = exercise.efficiency(1.0, 2.0, [MEGABYTE], 2, 0.0, 1e-6)
    assert found == pytest.approx(3 / 4), "one bucket is full only when backward ends"


def test_buckets_before_the_last_hide_behind_backward() -> None:
    found = exercise.efficiency(1.0, 2.0, [MEGABYTE, MEGABYTE], 2, 0.0, 1e-6)
    assert found == pytest.approx(3 / 4)
    found = exercise.efficiency(1.0, 2.0, [MEGABYTE // 2] * 4, 2, 0.0, 1e-6)
    assert found == pytest.approx(3 / 3.5)


def test_every_message_pays_its_latency() -> None:
    """Four ranks: 6 sends of 0.1 s for each of two buckets that are full at 0.5 s and 1 s."""
    found = exercise.efficiency(1.0, 1.0, [8, 8], 4, 0.1, 0.0)
    assert found == pytest.approx(2 / (1 + 0.5 + 1.2))


def test_random_steps_agree_with_the_model_of_the_book() -> None:
    chance = random.Random(0)
    for _ in range(200):
        case = (
            chance.uniform(0.01, 1),
            chance.uniform(0.01, 2),
            [chance.randint(1, 30 * MEGABYTE) for _ in range(chance.randint(1, 9))],
            chance.randint(1, 64),
            chance.uniform(0, 1e-3),
            chance.uniform(1e-11, 1e-8),
        )
        assert exercise.efficiency(*case) == pytest.approx(expected(*case)), case


@pytest.mark.parametrize("target", [0.3, 0.8, 0.95])
@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_smallest_batch_reaches_the_target_and_the_next_smaller_does_not(
    target: float, world_size: int
) -> None:
    link = [MEGABYTE, 25 * MEGABYTE, 25 * MEGABYTE], world_size, 1e-4, 1e-9
    found = exercise.smallest_batch(target, 1e-3, *link)
    assert isinstance(found, int)
    assert found >= 1

    def reached(batch: int) -> float:
        return expected(batch * 1e-3 / 3, batch * 2e-3 / 3, *link)

    assert reached(found) >= target - 1e-9, f"{found} reaches {reached(found)}"
    if found > 1:
        smaller = reached(found - 1)
        assert smaller < target + 1e-9, f"{found - 1} would do: it reaches {smaller}"
