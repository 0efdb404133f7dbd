"""When `exercises/14_clinic.py` is right: healthy steps, and one fault after the other."""

from collections.abc import Callable

import pytest
import torch
from harness import load
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from miniddp import run_ranks

exercise = load("14_clinic")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def own_inputs(rank: int) -> Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(rank))


def examined(model: nn.Module, forward: nn.Module, inputs: Tensor, trained: nn.Module) -> list[str]:
    """One backward pass through `forward`, then the doctor's findings on `model`."""
    forward(inputs).square().mean().backward()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    return exercise.examine(model, optimizer, inputs)


def healthy(rank: int) -> list[str]:
    model = net()
    return examined(model, DistributedDataParallel(model), own_inputs(rank), model)


def frozen(rank: int) -> list[str]:
    model = net()
    model[0].requires_grad_(False)
    return examined(model, DistributedDataParallel(model), own_inputs(rank), model[2])


def inputs_of_other_shapes(rank: int) -> list[str]:
    model = net()
    inputs = torch.ones(2 + rank, 3)
    return examined(model, DistributedDataParallel(model), inputs, model)


def around_the_wrapper(rank: int) -> list[str]:
    model = net()
    DistributedDataParallel(model)
    return examined(model, model, own_inputs(rank), model)


def gradient_on_one_rank(rank: int) -> list[str]:
    model = net()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    if rank == 1:
        model[0].bias.grad = None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return exercise.examine(model, optimizer, own_inputs(rank))


def unfrozen_late(rank: int) -> list[str]:
    model = net()
    model[0].requires_grad_(False)
    ddp = DistributedDataParallel(model)
    model[0].requires_grad_(True)
    return examined(model, ddp, own_inputs(rank), model)


def without_the_head(rank: int) -> list[str]:
    model = net()
    return examined(model, DistributedDataParallel(model), own_inputs(rank), model[0])


def without_the_head_on_rank_1(rank: int) -> list[str]:
    model = net()
    trained = model[0] if rank == 1 else model
    return examined(model, DistributedDataParallel(model), own_inputs(rank), trained)


def the_same_inputs(rank: int) -> list[str]:
    model = net()
    return examined(model, DistributedDataParallel(model), own_inputs(0), model)


def the_same_nan(rank: int) -> list[str]:
    model = net()
    inputs = torch.full((2, 3), float("nan"))
    return examined(model, DistributedDataParallel(model), inputs, model)


def everything_at_once(rank: int) -> list[str]:
    model = net()
    return examined(model, model, own_inputs(rank % 2), model[0])


FIRST = ["gradient differs: 0.weight", "gradient differs: 0.bias"]
HEAD = ["not optimized: 2.weight", "not optimized: 2.bias"]
ALL = [*FIRST, "gradient differs: 2.weight", "gradient differs: 2.bias"]


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (healthy, []),
        (frozen, []),
        (inputs_of_other_shapes, []),
        (around_the_wrapper, ALL),
        (gradient_on_one_rank, ["gradient differs: 0.bias"]),
        (unfrozen_late, FIRST),
        (without_the_head, HEAD),
        (without_the_head_on_rank_1, HEAD),
        (the_same_inputs, ["same inputs on every rank"]),
        (the_same_nan, ["same inputs on every rank"]),
    ],
)
def test_two_ranks(step: Callable[[int], list[str]], expected: list[str]) -> None:
    for rank, findings in enumerate(run_ranks(step, 2, timeout=30)):
        assert findings == expected, f"rank {rank}"


def test_three_ranks_of_which_two_are_alike() -> None:
    for rank, findings in enumerate(run_ranks(everything_at_once, 3, timeout=30)):
        assert findings == [*ALL, *HEAD], f"rank {rank}"


def test_one_rank_alone_has_no_other_to_compare_with() -> None:
    assert run_ranks(healthy, 1, timeout=30) == [[]]
