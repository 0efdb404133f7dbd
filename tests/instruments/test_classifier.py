"""The classifier that is trained many times, and the noise in its gradients."""

import math

import pytest
import torch
from torch import nn

from instruments.classifier import (
    CLASSES,
    GUESSING,
    INPUTS,
    Samples,
    classifier,
    evaluate,
    loss_of,
    noisy_samples,
    steps_until,
    train,
)
from instruments.noise_scale import (
    distance,
    fit_steps,
    gradient,
    noise_from_lengths,
    noise_of,
    noise_of_ranks,
)

SAMPLES = noisy_samples(256, seed=1)
HELD_OUT = noisy_samples(512, seed=2)


def test_samples_are_the_same_again_and_others_with_another_seed() -> None:
    again = noisy_samples(256, seed=1)
    assert torch.equal(SAMPLES.inputs, again.inputs)
    assert torch.equal(SAMPLES.labels, again.labels)
    assert not torch.equal(SAMPLES.inputs, noisy_samples(256, seed=2).inputs)
    assert set(SAMPLES.labels.tolist()) == set(range(CLASSES))


def test_every_sample_is_in_one_batch() -> None:
    whole = SAMPLES.split(100)
    assert [len(batch) for batch in whole] == [100, 100, 56]
    assert torch.equal(torch.cat([batch.inputs for batch in whole]), SAMPLES.inputs)
    shuffled = SAMPLES.shuffled(100, seed=3)
    assert [len(batch) for batch in shuffled] == [100, 100, 56]
    inputs = torch.cat([batch.inputs for batch in shuffled])
    assert not torch.equal(inputs, SAMPLES.inputs)
    assert inputs.sum().item() == pytest.approx(SAMPLES.inputs.sum().item(), abs=1e-3)
    labels = torch.cat([batch.labels for batch in shuffled])
    assert torch.equal(labels.sort().values, SAMPLES.labels.sort().values)


def test_it_learns_what_other_samples_have_too() -> None:
    model = classifier(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = train(model, optimizer, noisy_samples(2048, 1).split(8), lambda _: 0.05)
    assert len(losses) == 256
    assert evaluate(model, HELD_OUT) < 0.85 * GUESSING


def test_each_step_has_its_own_rate() -> None:
    model = classifier(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=9.0)
    before = [parameter.clone() for parameter in model.parameters()]
    train(model, optimizer, SAMPLES.split(128), lambda step: 0.0)
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    train(model, optimizer, SAMPLES.split(128), lambda step: 0.1 * step)
    assert optimizer.param_groups[0]["lr"] == 0.1, "of the second step"


def test_a_loss_that_is_no_number_is_infinite() -> None:
    model = classifier(0)
    nn.init.constant_(model[0].weight, math.nan)
    assert evaluate(model, HELD_OUT) == math.inf


def steps_to(target: float, most: float) -> float:
    model = classifier(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return steps_until(target, model, optimizer, SAMPLES.split(64), HELD_OUT, most)


def test_steps_are_counted_until_the_loss_is_reached() -> None:
    start = evaluate(classifier(0), HELD_OUT)
    assert steps_to(start, 100) == 4, "it is looked at every four steps"
    taken = steps_to(0.85 * start, 100)
    assert 4 < taken < 100
    assert steps_to(0.85 * start, taken) == taken
    assert steps_to(0.85 * start, taken - 1) == math.inf
    assert steps_to(0.0, 11) == math.inf, "after more steps than there are batches"


# The noise


def test_the_noise_scale_is_that_of_single_samples() -> None:
    model = classifier(1)
    found = noise_of(model, SAMPLES)
    singles = torch.stack([gradient(model, one) for one in SAMPLES.split(1)]).double()
    mean = singles.mean(0)
    variance = (singles - mean).square().sum(1).mean()
    assert torch.allclose(found.mean, mean, atol=1e-6)
    assert found.scale == pytest.approx((variance / mean.square().sum()).item(), rel=1e-3)


def test_a_batch_is_as_far_off_as_the_noise_scale_says() -> None:
    torch.manual_seed(0)
    model = classifier(1)
    found = noise_of(model, SAMPLES)
    for batch in (8, 128):
        expected = math.sqrt(found.scale / batch)
        assert distance(model, SAMPLES, found.mean, batch) == pytest.approx(expected, rel=0.2)


def test_the_gradients_of_ranks_tell_the_noise_scale() -> None:
    torch.manual_seed(0)
    model = classifier(1)
    found = noise_of_ranks(model, SAMPLES, ranks=4, batch=8, steps=200)
    assert found == pytest.approx(noise_of(model, SAMPLES).scale, rel=0.3)


def test_two_lengths_give_the_noise_scale() -> None:
    """|G|² is 4 and the variance 12: 4 + 12 / 2 with two samples, 4 + 12 / 6 with six."""
    assert noise_from_lengths(10.0, 6.0, 2, 6) == pytest.approx(3.0)


def test_the_gradient_is_that_of_backward() -> None:
    model = nn.Sequential(nn.Linear(INPUTS, CLASSES))
    one = Samples(SAMPLES.inputs[:3], SAMPLES.labels[:3])
    loss_of(model, one).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert torch.allclose(gradient(model, one), expected)


def test_the_curve_that_made_the_steps_is_found() -> None:
    batches = [8, 16, 64, 512]
    curve = fit_steps(batches, [40.0 * (1 + 100.0 / batch) for batch in batches])
    assert curve == pytest.approx((40.0, 100.0), rel=1e-3)
