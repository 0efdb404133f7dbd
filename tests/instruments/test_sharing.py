"""A step on ranks that share a machine: what is measured, and what is predicted of it."""

import pytest
import torch

from instruments import sharing
from instruments.models import equal_layers
from instruments.sharing import Model, Shared
from miniddp import run_ranks
from miniddp.bucket import MIB

SMALL = Model(width=16, layers=3, bucket_mib=0.001)


def test_every_batch_is_measured_in_three_ways() -> None:
    sweep = run_ranks(sharing.measure, 2, SMALL, [1, 4], 2)[0]
    assert list(sweep.steps) == [1, 4]
    for batch, step in sweep.steps.items():
        assert step.batch == batch
        assert step.alone > step.backward > 0
        assert min(step.together, step.ddp) > 0
    assert SMALL.parameters == 3 * (16 * 16 + 16)
    assert sum(sweep.bucket_bytes) == 4 * SMALL.parameters
    assert len(sweep.bucket_bytes) > 1


def waits_at_barriers(rank: int) -> Shared:
    """Of a rank 0 that is alone slow; the others never take that step."""
    clocks = iter([0.0, 1.0, 3.0, 4.0, *[float(second) for second in range(10, 100)]])
    sharing.clock = lambda: next(clocks)
    sharing.WARM_UP_ROUNDS = 0
    return sharing.measure(rank, SMALL, [1], 1).steps[1]


def test_the_slowest_rank_counts() -> None:
    """Rank 0's clock goes 1 s of forward, 2 of backward, 1 of the optimizer, then by seconds."""
    first, second = run_ranks(waits_at_barriers, 2)
    assert first == second
    assert (first.alone, first.backward) == (4.0, 2.0)
    assert first.together == 4.0, "on rank 1, whose first step this is"


def test_a_prediction_by_hand() -> None:
    """1 s of forward, 2 of backward in two equal buckets, each of which travels for 3 s."""
    shared = Shared(batch=1, alone=3.0, backward=2.0, together=9.0, ddp=9.0)
    guess = sharing.predict(shared, [MIB, MIB], lambda size: 3.0 * size / MIB)
    assert guess.hidden == pytest.approx(1 + 1 + 3 + 3)
    assert guess.exposed == pytest.approx(1 + 2 + 3 + 3)


def test_equal_layers_are_equal_on_all_ranks_and_compute_alike() -> None:
    torch.manual_seed(7)
    one = equal_layers(4, 2)
    other = equal_layers(4, 2)
    assert [layer[0].weight.shape for layer in one] == [(4, 4), (4, 4)]
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)
