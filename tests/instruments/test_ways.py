"""The ways to average, by hand and on ranks; the models that are simulated."""

import pytest
import torch
from torch import nn

from instruments import overlapped, predictions, ways
from instruments.cost import Link
from instruments.many_ranks import efficiency, wait_of
from instruments.models import layers_by_bytes
from instruments.network import NODES, Network
from instruments.overlapped import Training
from instruments.simulator import Copies, Layer
from instruments.ways import ACCUMULATED, FLAT, OVERLAPPED, PER_PARAMETER, Bench, Measured
from miniddp import run_ranks
from miniddp.bucket import MIB

TWO = [Layer(1, 2, [10, 30]), Layer(1, 2, [40])]


def per_byte(size: float) -> float:
    return size / 10


def test_each_way_by_hand() -> None:
    """6 s of compute, 8 s of messages, of which backward hides 2 s, or 6 while it fills a bucket.

    The flat message is filled for 8 s and emptied for 4. Of the buckets, the first is emptied
    while the second travels.
    """
    copies = Copies(filling=0.1, emptying=0.05)
    found = ways.simulated_ways(TWO, per_byte, 40, 40, copies=copies, optimizer=3)
    assert {name: step.exposed for name, step in found.items()} == {
        PER_PARAMETER: 8,
        FLAT: 8 + 8 + 4,
        OVERLAPPED: 4 + 4 + 4 + 2,
        ACCUMULATED: 4 + 4 + 4 + 2,
    }
    assert [len(step.spans) for step in found.values()] == [
        4 + 3 + 1,
        4 + 1 + 1 + 1,
        4 + 2 + 2 + 1,
        16 + 2 + 2 + 1,
    ]
    assert found[ACCUMULATED].compute == 4 * 6 + 3
    assert ways.per_micro_batch(ACCUMULATED, found[ACCUMULATED].compute) == 27 / 4
    assert ways.per_micro_batch(OVERLAPPED, 6) == 6


def test_messages_that_take_compute_take_it_where_they_overlap() -> None:
    free = ways.simulated_ways(TWO, per_byte, 40, 40)
    stolen = ways.simulated_ways(TWO, per_byte, 40, 40, stolen=1)
    for name in (PER_PARAMETER, FLAT):
        assert stolen[name] == free[name]
    for name in (OVERLAPPED, ACCUMULATED):
        assert stolen[name].exposed == 8


BENCH = Bench(width=8, layers=2, batch=4, cap_mib=1, rounds=2)


def averaged(rank: int) -> dict[str, list[float]]:
    """The gradients of one parameter by each way, whose ranks had 1 and 3."""
    found = {}
    acts = {
        "each": ways.one_message_each,
        "flat": ways.one_flat_message,
        "packed": lambda model: ways.one_flat_message(model, send=False),
    }
    for name, average in acts.items():
        model = nn.Linear(2, 1)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1.0 + 2 * rank)
        average(model)
        found[name] = torch.cat([part.flatten() for part in ways.gradients(model)]).tolist()
    return found


def test_gradients_are_averaged_and_packing_sends_nothing() -> None:
    first, second = run_ranks(averaged, 2)
    assert first == {"each": [2.0] * 3, "flat": [2.0] * 3, "packed": [0.5] * 3}
    assert second == {"each": [2.0] * 3, "flat": [2.0] * 3, "packed": [1.5] * 3}


def test_everything_that_a_step_sends_is_measured() -> None:
    found = run_ranks(ways.measure_ways, 2, BENCH)[0]
    layer = 4 * (8 * 8 + 8)
    assert list(found.ways) == [PER_PARAMETER, FLAT, OVERLAPPED, ACCUMULATED]
    assert list(found.all_reduces) == [256, 32, MIB, 2 * layer]
    assert found.share_of_core.keys() == found.all_reduces.keys()
    assert min(*found.ways.values(), *found.all_reduces.values(), found.packing) > 0
    assert 0 <= found.stolen <= 1
    assert found.ways[ACCUMULATED] > found.forward


def test_what_was_measured_goes_into_the_simulator() -> None:
    sizes = [32, 256, 576, MIB]
    measured = Measured(
        bench=BENCH,
        ways={},
        forward=1.0,
        compute=4.0,
        packing=0.25,
        all_reduces={size: size / 1000 for size in sizes},
        share_of_core={MIB: 1.5},
    )
    assert measured.stolen == 1.0
    found = measured.simulated(2)
    assert found[PER_PARAMETER].compute == 4.0
    assert found[PER_PARAMETER].exposed == pytest.approx(0.576)
    assert found[FLAT].exposed == pytest.approx(0.576 + 0.25)
    assert found[OVERLAPPED].exposed == pytest.approx(0.576 + 0.25), "the whole fits one bucket"


# Many ranks


def test_what_the_link_needs_and_what_is_left_after_backward() -> None:
    """8 s of messages, of which those of the last layer hide behind 2 s of backward."""
    assert wait_of(TWO, [[2], [1], [0]], per_byte) == (8, 6)
    assert wait_of(TWO, [[2, 1, 0]], per_byte) == (8, 8)


def test_what_slow_ranks_leave_of_a_step() -> None:
    """Without messages the step takes as long as its slowest rank: 1 + spread (H - 1)."""
    silent = [Layer(1, 2, [0])]
    free = Network(8, Link(0, 0), Link(0, 0))
    assert efficiency(silent, [[0]], free, 1, 0.0) == pytest.approx(1, abs=1e-4)
    harmonic = sum(1 / number for number in range(1, 65))
    found = efficiency(silent, [[0]], free, 64, 0.5)
    assert found == pytest.approx(1 / (1 + 0.5 * (harmonic - 1)), rel=0.05)
    assert found == efficiency(silent, [[0]], free, 64, 0.5), "the seed is fixed"


def test_messages_leave_less_than_slow_ranks_alone() -> None:
    node = NODES["DGX H100"]
    even = efficiency(TWO, [[2, 1, 0]], node, 64, 0.0)
    assert even == pytest.approx(6 / (6 + node.all_reduce_seconds(80, 64)))
    assert efficiency(TWO, [[2, 1, 0]], node, 64, 0.1) < even


# Models


def test_compute_follows_the_bytes_but_not_those_of_an_embedding() -> None:
    module = nn.ModuleDict({"embeddings": nn.Embedding(5, 2), "body": nn.Linear(2, 3)})
    assert layers_by_bytes(module, 9.0) == [
        Layer(0, 0, [40]),
        Layer(3 * 6 / 9, 6 * 6 / 9, [24]),
        Layer(3 * 3 / 9, 6 * 3 / 9, [12]),
    ]


def test_the_models_of_the_trainings_are_those_whose_bytes_are_known() -> None:
    """`GRADIENTS` rounds BERT's vocabulary up by 6 words, each a row and a bias of the decoder."""
    counts = {
        name: sum(parameter.numel() for parameter in module.parameters())
        for name, module in overlapped.modules().items()
    }
    counts["BERT-Base"] += 6 * (768 + 1)
    counts["BERT-Large"] += 6 * (1024 + 1)
    assert counts == predictions.GRADIENTS


def test_a_training_lies_between_its_bounds_or_outside() -> None:
    def training(measured: float) -> Training:
        return Training("BERT-Base", "10GbE with TCP/IP", 32, "merged", 80.0, measured, 100.0)

    assert [training(rate).outside for rate in (80.0, 90.0, 100.0)] == [0, 0, 0]
    assert training(64.0).outside == 0.25
    assert training(120.0).outside == pytest.approx(0.2)
    assert training(80.0).too_much == 0.25


def test_every_training_with_overlap_lies_near_its_bounds() -> None:
    found = overlapped.trainings()
    assert len(found) == 36
    assert {training.messages for training in found} == {"merged", "per tensor"}
    assert all(training.lowest < training.highest for training in found)
    assert max(training.outside for training in found) < 0.2
