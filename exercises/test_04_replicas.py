"""Every rank learns that the replicas differ, and which parameter is the first."""

import pytest
import torch
import torch.distributed as dist
from harness import load
from torch import Tensor, nn

from miniddp import run_ranks

exercise = load("04_replicas")

WORLD_SIZE = 3
NAMES = ["0.weight", "0.bias", "1.weight", "1.bias"]


def change(elements: Tensor, exchange: bool) -> None:
    if exchange:
        elements.copy_(elements.flip(0))
    else:
        elements[-1] += 1e-6


def verdict(rank: int, changed: dict[int, list[str]]) -> str:
    """What `verify` says on this rank; `changed` names the parameters that a rank changes.

    Their last element grows a little; where it is the last rank, two elements change places.
    """
    torch.manual_seed(42)
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    with torch.no_grad():
        for name in changed.get(rank, []):
            change(module.get_parameter(name).view(-1), exchange=rank == WORLD_SIZE - 1)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    message = ""
    try:
        exercise.verify(module)
    except ValueError as error:
        message = str(error) or "(no message)"
    for parameter, old in zip(module.parameters(), before, strict=True):
        assert torch.equal(parameter, old), "verify must not change a parameter"
    ranks = torch.tensor([rank])
    dist.all_reduce(ranks)
    assert ranks == sum(range(WORLD_SIZE)), "the ranks no longer call the same collectives"
    return message


def test_equal_replicas_pass() -> None:
    assert run_ranks(verdict, WORLD_SIZE, {}, timeout=30) == [""] * WORLD_SIZE


@pytest.mark.parametrize(
    ("changed", "first"),
    [
        pytest.param({2: ["0.weight"]}, "0.weight", id="the last rank"),
        pytest.param({1: ["1.bias"]}, "1.bias", id="the last parameter"),
        pytest.param({0: ["0.bias"]}, "0.bias", id="rank 0"),
        pytest.param({1: ["1.weight"], 2: ["0.bias"]}, "0.bias", id="two ranks, two parameters"),
        pytest.param({1: ["0.bias", "1.bias"]}, "0.bias", id="one rank, two parameters"),
    ],
)
def test_every_rank_names_the_first_that_differs(changed: dict[int, list[str]], first: str) -> None:
    messages = run_ranks(verdict, WORLD_SIZE, changed, timeout=30)
    for rank, message in enumerate(messages):
        assert message, f"rank {rank} raised no ValueError"
        named = [name for name in NAMES if name in message]
        assert named == [first], f"rank {rank} said: {message}"
