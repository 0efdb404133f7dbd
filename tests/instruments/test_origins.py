import pytest
import torch.distributed as dist
from torch import nn

from instruments.origins import STEPS, small_model, summary, train_with
from miniddp import run_ranks

NAMES = [name for name, _ in small_model().named_parameters()]


def nothing(model: nn.Module) -> None:
    pass


def average(model: nn.Module) -> None:
    def hook(parameter: nn.Parameter) -> None:
        parameter.grad /= dist.get_world_size()
        dist.all_reduce(parameter.grad)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)


def add(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))


@pytest.mark.parametrize(
    ("install", "origin", "replicas"),
    [
        (nothing, "own gradient", "different"),
        (average, "mean of the ranks", "equal"),
        (add, "neither own nor mean", "equal"),
    ],
)
def test_each_gradient_is_judged(install, origin, replicas):
    found = run_ranks(train_with, 2, install)
    assert found == [[dict.fromkeys(NAMES, origin)] * STEPS] * 2
    printed = f"steps 1, 2, 3: {origin}\nreplicas at the end: {replicas}\n"
    assert [" ".join(text.split()) for text in found.outputs] == [" ".join(printed.split())] * 2


def test_a_hook_of_each_pass_averages_what_has_accumulated():
    found = run_ranks(train_with, 2, average, 2)
    assert found == [[dict.fromkeys(NAMES, "mean of the ranks")] * STEPS] * 2


def test_what_is_alike_in_several_steps_is_said_once():
    steps = [{"a": "own", "b": "mean"}, {"a": "mean", "b": "mean"}, {"a": "own", "b": "mean"}]
    assert summary(steps) == ["steps 1, 3: own: a", "steps 1, 3: mean: b", "step 2: mean"]
