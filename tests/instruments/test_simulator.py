"""The step simulator: by hand, against other ways to compute the same, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from instruments.cost import Link, ring_all_reduce_seconds
from instruments.simulator import (
    COMMUNICATION,
    COMPUTE,
    Copies,
    Layer,
    Span,
    Step,
    buckets,
    even_layers,
    expected_maximum,
    simulate,
)
from miniddp.bucket import MIB

THREE = [Layer(1, 2, [10, 30]), Layer(1, 2, [40]), Layer(2, 4, [20])]
SIZES = st.lists(st.integers(1, 10**9), min_size=1, max_size=12)
PARTS = st.floats(0, 1)


def per_byte(size: float) -> float:
    return size / 10


def rows(step: Step, stream: str) -> list[tuple[str, float, float]]:
    return [span[1:] for span in step.spans if span.stream == stream]


def test_naive_by_hand() -> None:
    """4 s of forward, 8 s of backward, then four messages, the last gradient first."""
    step = simulate(THREE, per_byte, overlapped=False)
    assert rows(step, COMMUNICATION) == [
        ("bucket 0", 12, 14),
        ("bucket 1", 14, 18),
        ("bucket 2", 18, 21),
        ("bucket 3", 21, 22),
    ]
    assert (step.compute, step.communication) == (12, 10)
    assert (step.exposed, step.seconds) == (10, 22)


def test_overlapped_by_hand() -> None:
    """The last layer is ready at 8 s, the middle one at 10, the first one at 12."""
    step = simulate(THREE, per_byte, [[3], [2], [1, 0]])
    assert rows(step, COMPUTE)[3:] == [("backward 2", 4, 8), ("backward 1", 8, 10),
                                       ("backward 0", 10, 12)]  # fmt: skip
    assert rows(step, COMMUNICATION) == [
        ("bucket 0", 8, 10),
        ("bucket 1", 10, 14),
        ("bucket 2", 14, 18),
    ]
    assert step.exposed == 6


def test_a_bucket_waits_for_its_turn() -> None:
    """The first bucket of the plan is full last: nothing overlaps."""
    step = simulate(THREE, per_byte, [[0], [3], [2], [1]])
    assert rows(step, COMMUNICATION)[0] == ("bucket 0", 12, 13)


def test_only_the_last_micro_batch_sends() -> None:
    once, thrice = (simulate(THREE, per_byte, micro_batches=count) for count in (1, 3))
    assert thrice.compute == 3 * once.compute
    assert thrice.exposed == once.exposed
    assert thrice.communication == once.communication
    first = rows(thrice, COMMUNICATION)[0]
    assert first == ("bucket 0", 24 + 8, 24 + 10)


def test_a_link_that_steals_all_compute_hides_nothing() -> None:
    apart = simulate(THREE, per_byte, overlapped=False)
    stolen = simulate(THREE, per_byte, stolen=1)
    assert stolen.seconds == apart.seconds == 22


def test_half_of_the_compute_stolen_by_hand() -> None:
    """Of the 2 s of backward 1, the link takes half the speed while bucket 0 travels for 2 s."""
    step = simulate([Layer(0, 2, [1]), Layer(0, 2, [20])], per_byte, stolen=0.5)
    assert step.spans[2:] == (
        Span(COMPUTE, "backward 1", 0, 2),
        Span(COMMUNICATION, "bucket 0", 2, 4),
        Span(COMPUTE, "backward 0", 2, 5),
        Span(COMMUNICATION, "bucket 1", 5, 5.1),
    )
    assert step.exposed == pytest.approx(1.1)


def test_the_slowest_rank_is_waited_for() -> None:
    slow = simulate(THREE, per_byte, overlapped=False, slowest=1.5)
    assert slow.seconds == 18 + 10
    assert slow.compute == 12
    assert slow.exposed == 16


COPIED = Copies(filling=0.1, emptying=0.05)


def test_copies_and_the_optimizer_by_hand() -> None:
    """Each part of backward takes 6 s, with what it fills. One bucket travels 6 s, one 4.

    Both are emptied after backward: the first at once, the second when it has arrived.
    """
    layers = [Layer(1, 2, [40]), Layer(1, 2, [40]), Layer(2, 4, [20])]
    step = simulate(layers, per_byte, [[2, 1], [0]], copies=COPIED, optimizer=5)
    assert rows(step, COMPUTE)[3:] == [
        ("backward 2", 4, 10),
        ("backward 1", 10, 16),
        ("backward 0", 16, 22),
        ("empty 0", 22, 25),
        ("empty 1", 26, 28),
        ("optimizer", 28, 33),
    ]
    assert rows(step, COMMUNICATION) == [("bucket 0", 16, 22), ("bucket 1", 22, 26)]
    assert step.compute == 12 + 5
    assert step.exposed == 33 - 17


def test_views_are_filled_but_not_emptied() -> None:
    step = simulate(THREE, per_byte, overlapped=False, copies=Copies(filling=0.1))
    assert step.seconds == 12 + 10 + 10


def test_only_the_last_micro_batch_fills_buckets() -> None:
    once, thrice = (
        simulate(THREE, per_byte, micro_batches=count, copies=COPIED, optimizer=5)
        for count in (1, 3)
    )
    assert thrice.exposed == once.exposed
    assert thrice.compute == 36 + 5


@given(SIZES, st.floats(0, 9), st.floats(0.1, 9), st.floats(1e-12, 1e-8), st.floats(0, 0.1), PARTS)
def test_every_step_against_its_bounds(
    sizes: list[int], forward: float, backward: float, beta: float, alpha: float, stolen: float
) -> None:
    def all_reduce(size: float) -> float:
        return alpha + beta * size

    layers = even_layers(sizes, forward, backward)
    step = simulate(layers, all_reduce, stolen=stolen)
    apart = simulate(layers, all_reduce, overlapped=False)
    close = 1e-9 * apart.seconds
    assert step.compute == pytest.approx(forward + backward)
    assert apart.seconds == pytest.approx(forward + backward + apart.communication)
    assert apart.seconds >= step.seconds - close
    assert step.seconds >= max(step.compute, step.communication + forward) - close
    for stream in (COMPUTE, COMMUNICATION):
        for earlier, later in pairwise(rows(step, stream)):
            assert later[1] >= earlier[2] - close, "one thing at a time"


@given(SIZES, st.data())
def test_the_last_bucket_ends_with_the_longest_chain(sizes: list[int], data: st.DataObject) -> None:
    """One bucket's moment, then all messages from it on: which of these chains is the longest?"""
    times = data.draw(st.lists(st.floats(0, 9), min_size=len(sizes), max_size=len(sizes)))
    seconds = dict(zip(range(1, len(sizes) + 1), times, strict=True))
    ready = np.cumsum(sizes)
    layers = [Layer(0, size, [i]) for i, size in reversed(list(enumerate(sizes, 1)))]
    step = simulate(layers, lambda number: seconds[int(number)])
    chains = [moment + sum(times[i:]) for i, moment in enumerate(ready)]
    assert step.spans[-1].end == pytest.approx(max(chains))


def test_buckets_are_those_of_ddp() -> None:
    layers = [Layer(0, 1, [30 * MIB, MIB]), Layer(0, 1, [20 * MIB]), Layer(0, 1, [10 * MIB])]
    assert buckets(layers) == [[3], [2, 1, 0]]
    assert buckets(layers, MIB, MIB) == [[3], [2], [1], [0]]
    assert buckets(layers, 100 * MIB, 100 * MIB) == [[3, 2, 1, 0]]


def test_buckets_hide_what_one_bucket_cannot_until_latency_eats_it() -> None:
    million, latency = 10**6, Link(1e-3, 1e-9)

    def exposed(sizes: list[int]) -> float:
        def all_reduce(size: float) -> float:
            return ring_all_reduce_seconds(size, 8, latency)

        return simulate(even_layers(sizes, 0, 0.5), all_reduce).exposed

    whole = ring_all_reduce_seconds(100 * million, 8, latency)
    one, ten = exposed([100 * million]), exposed([10 * million] * 10)
    assert one == pytest.approx(whole)
    assert ten < one / 4
    assert exposed([10**4] * 10**4) > one


@pytest.mark.parametrize("count", [1, 8, 1024, 16384])
def test_the_slowest_of_many_exponential_draws(count: int) -> None:
    """The expected maximum of n draws is the n-th harmonic number."""
    harmonic = float(np.sum(1 / np.arange(1, count + 1)))
    found = expected_maximum(lambda g, n: g.exponential(size=n), count, seed=1, trials=400)
    assert found == pytest.approx(harmonic, abs=4 * 1.29 / 400**0.5)
    again = expected_maximum(lambda g, n: g.exponential(size=n), count, seed=1, trials=400)
    assert again == found


REFUSED: dict[str, Callable[[], object]] = {
    "micro_batches must be an integer of at least 1, not 0": (
        lambda: simulate(THREE, per_byte, micro_batches=0)
    ),
    "backward of layer 1 must be a finite number of at least 0, not -2": (
        lambda: simulate([THREE[0], Layer(1, -2, [1])], per_byte)
    ),
    "smallest_gradient must be": lambda: simulate([Layer(1, 1, [-1])], per_byte),
    "stolen must be a part from 0 to 1, not 1.5": lambda: simulate(THREE, per_byte, stolen=1.5),
    "slowest must be": lambda: simulate(THREE, per_byte, slowest=float("nan")),
    "hold each of the 4 gradients once: \\[\\[0, 1\\], \\[2\\]\\]": (
        lambda: simulate(THREE, per_byte, [[0, 1], [2]])
    ),
    "emptying must be": lambda: simulate(THREE, per_byte, copies=Copies(0, -1)),
    "optimizer must be": lambda: simulate(THREE, per_byte, optimizer=float("inf")),
    "seconds of bucket 0 must be": lambda: simulate(THREE, lambda size: -size),
    "bytes in some bucket, not \\[0\\]": lambda: even_layers([0], 1, 1),
    "trials must be": lambda: expected_maximum(lambda g, n: g.normal(size=n), 2, trials=0),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()
