"""Each way to train, against one process; and a way that is wrong."""

import sys
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam

from instruments import sharded_training
from instruments.sharded_training import Trained, Way, difference_from_one_process
from miniddp import run_ranks


class Output(NamedTuple):
    """`fully_shard` finds the tensors in what forward returns only if pytree knows its type."""

    loss: Tensor


class Layers(nn.Module):
    """As many blocks as asked for, in `model.model.layers`, and a loss."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.head = nn.Linear(width, 1)

    def forward(self, inputs: Tensor) -> Output:
        hidden = inputs
        for layer in self.model.layers:
            hidden = layer(hidden).tanh()
        return Output(loss=self.head(hidden).square().mean())


def build() -> Layers:
    torch.manual_seed(0)
    return Layers(count=2, width=5).double()


def without_communication(model: nn.Module) -> Trained:
    return model, Adam(model.parameters(), lr=1e-3)


WAYS = [
    sharded_training.ddp,
    sharded_training.zero1,
    sharded_training.torch_zero1,
    sharded_training.zero3,
    sharded_training.zero3_keeps,
    sharded_training.zero3_in_one_unit,
    sharded_training.torch_zero3,
    without_communication,
]


def compare(rank: int) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    batches = [{"inputs": torch.randn(4, 5, generator=generator).double()} for _ in range(3)]
    return [difference_from_one_process(way, build, batches) for way in WAYS]


def test_a_way_trains_what_one_process_does_and_silent_ranks_do_not():
    for *differences, silent in run_ranks(compare, 2):
        assert max(differences) < 1e-12
        assert silent > 1e-4


def precision(rank: int) -> tuple[str, str]:
    model, _ = sharded_training.torch_in_bf16(build().float())
    seen = []
    model.head.register_forward_hook(lambda head, inputs, output: seen.append(output.dtype))
    model(torch.ones(1, 5)).loss.backward()
    return str(seen[0]), str(model.head.weight.dtype)


def test_bf16_computes_in_16_bits_and_keeps_32():
    assert set(run_ranks(precision, 2)) == {("torch.bfloat16", "torch.float32")}


def reach(rank: int, way: Way) -> str:
    """With 72 MB of parameters, and 288 of all model states."""
    batch = {"inputs": torch.ones(2, 1500)}
    return sharded_training.reached_within(250e6, way, lambda: Layers(8, 1500), batch)


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_what_does_not_fit_whole_fits_in_shards():
    refused = "step 1, optimizer.step(): can't allocate memory"
    assert set(run_ranks(reach, 2, sharded_training.ddp)) == {refused}
    assert set(run_ranks(reach, 4, sharded_training.zero3)) == {"two steps done"}
