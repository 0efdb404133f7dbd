"""When `exercises/12_learning_rate.py` is right: on paper, then on gradients with known noise."""

import math

import pytest
import torch
from harness import load

exercise = load("12_learning_rate")


def gradients_with_noise(variance: float, batch: int, ranks: int, steps: int) -> torch.Tensor:
    """Of length 1, plus noise whose variance is shared by 100 weights: (steps, ranks, 100)."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(steps, ranks, 100, generator=generator) * math.sqrt(variance / batch / 100)
    return noise + 1 / 10


def test_two_ranks_on_paper() -> None:
    """|G|^2 + V/8 = 26 and |G|^2 + V/16 = 25: V = 16, |G|^2 = 24."""
    own = torch.tensor([3.0, 4.0]) + torch.tensor([[0.8, -0.6], [-0.8, 0.6]])
    assert exercise.noise_scale([list(own)], 8) == pytest.approx(16 / 24)


def test_the_mean_over_the_steps_comes_before_the_quotient() -> None:
    """The squares are 26 and 4 of the ranks, 25 and 3 of the mean: 15 and 14 over both steps."""
    first = torch.tensor([3.0, 4.0]) + torch.tensor([[0.8, -0.6], [-0.8, 0.6]])
    second = torch.tensor([math.sqrt(3), 0.0]) + torch.tensor([[0.0, 1.0], [0.0, -1.0]])
    found = exercise.noise_scale([list(first), list(second)], 8)
    assert found == pytest.approx(16 / 13)


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("scale", [10.0, 200.0])
def test_known_noise_is_found(scale: float, ranks: int) -> None:
    gradients = gradients_with_noise(scale, 32, ranks, 2000)
    assert exercise.noise_scale(gradients, 32) == pytest.approx(scale, rel=0.2)


def test_nothing_but_noise() -> None:
    own = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    assert exercise.noise_scale([list(own)], 4) == math.inf


@pytest.mark.parametrize(("optimizer", "rate"), [("sgd", 0.8), ("adam", 0.2)])
def test_the_rule_belongs_to_the_optimizer(optimizer: str, rate: float) -> None:
    assert exercise.learning_rate(5, 0.05, 32, 512, 5, optimizer) == pytest.approx(rate)
    assert exercise.learning_rate(900, 0.05, 32, 512, 5, optimizer) == pytest.approx(rate)


def test_the_warm_up_is_a_straight_line_from_the_base_rate() -> None:
    rates = [exercise.learning_rate(step, 0.1, 8, 32, 3, "sgd") for step in range(5)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])


def test_without_a_warm_up_the_first_step_has_the_full_rate() -> None:
    assert exercise.learning_rate(0, 0.1, 8, 32, 0, "sgd") == pytest.approx(0.4)


def test_another_optimizer_has_no_rule() -> None:
    with pytest.raises(ValueError, match="lamb"):
        exercise.learning_rate(0, 0.1, 8, 32, 0, "lamb")
