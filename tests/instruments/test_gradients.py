import math

import pytest
import torch
from torch import nn

from instruments.gradients import (
    flat_gradient,
    flat_weights,
    largest_difference,
    relative_error,
    scatter,
)


def layer() -> nn.Linear:
    model = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    return model


def test_vectors_follow_the_parameters_in_their_order():
    model = nn.Linear(2, 1)
    for number, parameter in enumerate(model.parameters()):
        parameter.data.fill_(number)
        parameter.grad = torch.full_like(parameter, 10.0 + number)
    assert flat_weights(model).tolist() == [0, 0, 1]
    assert flat_gradient(model).tolist() == [10, 10, 11]


def test_a_vector_of_weights_is_a_copy():
    model = layer()
    before = flat_weights(model)
    model.weight.data.zero_()
    assert before.tolist() == [1, 2, 3, 4]


def test_a_parameter_without_a_gradient_is_named():
    with pytest.raises(ValueError, match="'weight' has no gradient"):
        flat_gradient(layer())


def test_differences_do_not_depend_on_the_sign():
    one = torch.tensor([1.0, 5.0, 0.0])
    other = torch.tensor([1.0, 2.0, 4.0])
    assert largest_difference(one, other) == largest_difference(other, one) == 4
    assert relative_error(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 2.0])) == pytest.approx(
        math.sqrt(13) / 2
    )
    assert relative_error(2 * one, one) == pytest.approx(1)


def test_the_scatter_is_around_the_mean_and_adds_the_places_up():
    assert scatter(torch.tensor([[5.0, 5.0], [5.0, 5.0]])) == 0
    assert scatter(torch.tensor([[0.0, 10.0], [6.0, 18.0]])) == 5  # 3 and 4 from the mean
