"""Bytes that are counted, against tensors whose bytes are known."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from instruments.held import (
    LiveBytes,
    bytes_kept_for_backward,
    bytes_of_step,
    limit_memory,
    model_states,
    storage_bytes,
)
from miniddp import DistributedDataParallel, run_ranks
from miniddp.zero import FullyShardedModule, ShardedOptimizer

MEGA = 2**20


class Squares(nn.Module):
    """A weight of 4 MiB, and one operation that keeps as much for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(MEGA))

    def forward(self, inputs: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=(self.weight * inputs).exp().sum())


def test_a_storage_counts_once_and_whole():
    whole = torch.zeros(100)
    assert storage_bytes([whole[:10], whole.view(10, 10), torch.zeros(3)]) == 412


def test_what_backward_needs_is_counted_once_and_without_the_weights():
    model = Squares()
    inputs = torch.ones(MEGA)
    # The product keeps its inputs, the exponential its result; the weight is the model's.
    assert bytes_kept_for_backward(model, lambda: model(inputs).loss) == 8 * MEGA
    twice = bytes_kept_for_backward(model, lambda: model(inputs).loss + model(inputs).loss)
    assert twice == 12 * MEGA


def test_a_training_that_has_not_begun_holds_its_parameters():
    model = nn.Linear(10, 10)
    held = model_states(model, torch.optim.Adam(model.parameters()))
    assert (held.parameters, held.gradients, held.optimizer) == (440, 0, 0)


def held_by(rank: int, sharded: bool) -> tuple[int, int, int]:
    model = nn.Linear(16, 15)  # 255 parameters, and 4 ranks: one number is padded
    if sharded:
        model = FullyShardedModule(model)
        optimizer = torch.optim.Adam(model.parameters())
    else:
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.Adam)
    model(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    held = model_states(model, optimizer)
    return held.parameters, held.gradients, held.optimizer


def test_a_rank_holds_its_shard():
    assert set(run_ranks(held_by, 4, True)) == {(256, 256, 512)}
    owns = run_ranks(held_by, 4, False)
    assert {found[:2] for found in owns} == {(1020, 1020)}
    assert sum(found[2] for found in owns) == 2 * 1020


def test_live_bytes_follow_what_is_made_and_what_is_freed():
    given = torch.zeros(MEGA)
    before = torch.zeros(MEGA)  # is not given
    with LiveBytes([given]) as live:
        assert live.now() == 4 * MEGA
        made = before + 1
        view = made[:10]
        assert live.now() == 8 * MEGA
        del made
        assert live.now() == 8 * MEGA, "its view keeps the storage"
        del view
        assert live.now() == 4 * MEGA
    assert live.peak == 8 * MEGA


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's allocator rounds sizes up")
def test_a_step_has_a_peak_above_what_forward_keeps():
    module = Squares()
    optimizer = torch.optim.Adam(module.parameters(), foreach=False)
    inputs = {"inputs": torch.ones(MEGA)}
    bytes_of_step(module, optimizer, inputs)  # makes Adam's state
    optimizer.zero_grad()
    found = bytes_of_step(module, optimizer, inputs)
    assert found.before == pytest.approx(3 * 4 * MEGA, rel=1e-3)
    assert found.kept == pytest.approx(4 * MEGA, rel=1e-3), "the result of exp"
    assert found.peak > found.before + 2 * found.kept


def before_a_step(rank: int) -> int:
    ddp = DistributedDataParallel(Squares(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    return bytes_of_step(ddp, optimizer, {"inputs": torch.ones(MEGA)}).before


def test_the_buckets_of_ddp_count():
    assert list(run_ranks(before_a_step, 1)) == [2 * 4 * MEGA]


def allocate(rank: int, megabytes: int) -> str:
    limit_memory(200e6)
    try:
        torch.ones(megabytes * 250_000)
    except RuntimeError as error:
        return str(error)
    return "allocated"


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_memory_above_the_limit_is_refused():
    assert list(run_ranks(allocate, 1, 150)) == ["allocated"]
    assert "can't allocate memory" in run_ranks(allocate, 1, 250)[0]
