"""Chapter 11's job, and the effects that others published, by hand."""

import pytest

from instruments import job
from instruments.network import NODES
from instruments.published_effects import effects, factors
from miniddp.bucket import MIB


def test_the_buckets_are_torchs_and_hold_every_gradient() -> None:
    sizes = job.bucket_sizes()
    assert (len(sizes), sizes[-1]) == (121, 384 * MIB)
    assert sum(sizes) == 4 * job.MODEL.elements
    larger = job.bucket_sizes(100 * MIB)
    assert min(larger[:-1]) >= 100 * MIB
    assert sum(larger) == 4 * job.MODEL.elements


def test_a_step_computes_for_two_thirds_in_backward_and_ends_with_the_optimizer() -> None:
    step = job.step(8, NODES["DGX H100"])
    reached = 0.4 * 989.5e12
    assert job.COMPUTE * reached == pytest.approx(6 * 1.711e9 * 4096, rel=1e-3)
    optimizer = 28 * 1.711e9 / 3.35e12
    assert step.compute == pytest.approx(job.COMPUTE + optimizer, rel=1e-3)
    first = next(span for span in step.spans if span.name == "bucket 0")
    assert first.start > job.COMPUTE / 3
    assert step.spans[-1].name == "optimizer"
    assert job.efficiency(step) == pytest.approx(100 * step.compute / step.seconds)


def test_one_node_waits_for_copies_and_lost_multiprocessors_alone() -> None:
    """All but the last messages are hidden; each byte is copied in and out of its bucket.

    While the last message travels, the buckets before it are emptied: views save less than half.
    """
    step = job.step(8, NODES["DGX H100"])
    copied = 2 * 2 * job.GRADIENT_BYTES / 3.35e12
    stolen = step.communication * 8 / 108
    assert copied < step.exposed < copied + stolen + 0.001
    views = job.step(8, NODES["DGX H100"], views=True)
    assert 0 < step.exposed - views.exposed < copied / 2


@pytest.mark.parametrize("gpus", [8, 16, 256])
def test_the_causes_add_up_to_what_a_step_loses(gpus: int) -> None:
    found = job.losses(gpus, job.EIGHT_CARDS)
    assert sum(found) == pytest.approx(job.step(gpus, job.EIGHT_CARDS).exposed)
    assert min(found) > 0


def test_gradients_of_two_bytes_are_messages_of_half_the_size() -> None:
    half = job.step(16, job.ONE_CARD, sent=2)
    halved = [job.ONE_CARD.all_reduce_seconds(size / 2, 16) for size in job.bucket_sizes()]
    assert half.communication == pytest.approx(sum(halved))


def test_accumulation_sends_once_for_all_its_batches() -> None:
    whole = job.step(16, job.ONE_CARD)
    four = job.step(16, job.ONE_CARD, batches=4)
    assert four.communication == pytest.approx(whole.communication)
    assert four.compute - whole.compute == pytest.approx(3 * job.COMPUTE)


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
