"""What is said of replicas that differ, against values that differ by a known amount."""

import torch
from torch import nn

from instruments.replicas import (
    compare_gradients,
    mean_over_ranks,
    report,
    spread,
    spread_of,
)
from miniddp import run_ranks


def layer(weight: float, bias: float) -> nn.Linear:
    """One output; each value of the weight is `weight`."""
    module = nn.Linear(2, 1)
    nn.init.constant_(module.weight, weight)
    nn.init.constant_(module.bias, bias)
    return module


def differ_by_rank(rank: int) -> tuple[float, float, list[float], list[float]]:
    module = layer(weight=rank, bias=-3.0 * rank)
    value = torch.tensor([1.0, 10.0 * rank])
    found = spread(module), spread_of(value), mean_over_ranks(value).tolist()
    report(module)
    return *found, value.tolist()


def test_the_spread_is_the_largest_difference_between_any_two_ranks():
    for rank, found in enumerate(run_ranks(differ_by_rank, 3)):
        assert found == (6, 20, [1, 10], [1, 10 * rank])


def test_the_first_parameter_that_differs_is_named():
    for said in run_ranks(differ_by_rank, 3).outputs:
        assert said == "replicas differ: parameter 'weight'\n"


def compare_one_equal_gradient(rank: int) -> None:
    module = layer(weight=1.0, bias=0.0)
    module(torch.full((1, 2), float(rank))).sum().backward()
    compare_gradients(module)
    report(module)


def test_gradients_are_compared_one_by_one():
    for said in run_ranks(compare_one_equal_gradient, 2).outputs:
        assert said.splitlines() == ["weight    DIFFERENT", "bias      same", "replicas identical"]
