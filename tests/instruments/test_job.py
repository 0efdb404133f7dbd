"""Chapter 11's job, and the effects that others published, by hand."""

import pytest

from instruments import job
from instruments.network import NODES
from instruments.published_effects import effects, factors
from miniddp.bucket import MIB


def test_the_buckets_hold_every_gradient() -> None:
    sizes = job.bucket_bytes()
    assert (sizes[0], sizes[1], len(sizes)) == (MIB, 25 * MIB, 261)
    assert sum(sizes) == 4 * job.PARAMETERS
    assert sizes[-1] < 25 * MIB
    larger = job.bucket_bytes(100 * MIB)
    assert (larger[0], len(larger)) == (100 * MIB, 65)
    assert sum(larger) == 4 * job.PARAMETERS


def test_a_step_computes_for_two_thirds_in_backward() -> None:
    step = job.step(8, NODES["DGX H100"])
    assert step.compute == pytest.approx(job.COMPUTE)
    reached = 0.4 * 989.5e12
    assert job.COMPUTE * reached == pytest.approx(6 * 1.7e9 * 4096)
    first = next(span for span in step.spans if span.name == "bucket 0")
    assert first.start > job.COMPUTE / 3
    assert job.efficiency(step) == pytest.approx(100 * job.COMPUTE / step.seconds)


def test_gradients_of_two_bytes_are_messages_of_half_the_size() -> None:
    half = job.step(16, job.ONE_CARD, sent=2)
    halved = [job.ONE_CARD.all_reduce_seconds(size / 2, 16) for size in job.bucket_bytes()]
    assert half.communication == pytest.approx(sum(halved))


def test_accumulation_sends_once_for_all_its_batches() -> None:
    whole = job.step(16, job.ONE_CARD)
    four = job.step(16, job.ONE_CARD, batches=4)
    assert four.communication == pytest.approx(whole.communication)
    assert four.compute == pytest.approx(4 * whole.compute)


def test_twice_the_gpus_read_the_data_in_half_of_the_time() -> None:
    step = job.step(8, job.EIGHT_CARDS)
    steps = job.DATA / (8 * 4096)
    assert job.hours(8, step) == pytest.approx(steps * step.seconds / 3600)
    assert job.hours(16, step) == pytest.approx(job.hours(8, step) / 2)


# What others published


def test_a_factor_is_that_of_two_rows() -> None:
    rows = [
        {"change": "none", "rate": 10.0, "time": 4.0},
        {"change": "faster", "rate": 25.0, "time": 2.0},
        {"change": "slower", "rate": 20.0, "time": 8.0},
    ]
    assert factors(rows, "rate", more_is_better=True) == {"faster": 2.5, "slower": 0.8}
    assert factors(rows, "time", more_is_better=False) == {"faster": 2.0, "slower": 0.25}


def test_every_name_is_found_in_the_tables() -> None:
    found = {effect.remedy: effect for effect in effects()}
    assert len(found) == 9
    assert sum(effect.a100 is not None for effect in found.values()) == 7
    assert sum(effect.gpt2 is not None for effect in found.values()) == 5
    assert found["torch.compile"].a100 == pytest.approx(1.22, abs=0.005)
    assert found["torch.compile"].gpt2 == pytest.approx(2.31, abs=0.005)
    assert found["accumulation of 4"].others == pytest.approx(
        {"2 T4 in a node": 0.5 / 0.41, "in two nodes": 2.0 / 0.91}
    )
    for effect in found.values():
        assert effect.a100 or effect.gpt2 or effect.others
