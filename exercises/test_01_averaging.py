"""When `exercises/01_averaging.py` is right: against one process with the samples of all ranks."""

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from harness import check_close, load
from torch import Tensor, nn

from miniddp import run_ranks

exercise = load("01_averaging")
SPLITS = [[12], [6, 6], [4, 4, 4], [9, 3], [7, 4, 1], [5, 0, 7]]
Gradients = dict[str, Tensor]


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(12, 5, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(3, (12,), generator=generator)


def gradients_of(net: nn.Module, inputs: Tensor, labels: Tensor) -> Gradients:
    """Of the mean loss. Without a sample there is none: NaN everywhere."""
    if not len(inputs):
        return {name: torch.full_like(p, torch.nan) for name, p in net.named_parameters()}
    parameters = dict(net.named_parameters())
    loss = nn.functional.cross_entropy(net(inputs), labels)
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    return dict(zip(parameters, gradients, strict=True))


def own_gradients(counts: Sequence[int]) -> list[Gradients]:
    parts = zip(*(tensor.split(list(counts)) for tensor in samples()), strict=True)
    return [gradients_of(make_net(), *part) for part in parts]


def check(found: Gradients, wanted: Gradients, given: list[Gradients]) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        plain = torch.stack([gradients[name] for gradients in given]).mean(0)
        mistakes = {"the plain mean, which every rank's gradient enters alike": plain}
        check_close(found[name], wanted[name], name, mistakes)


@pytest.mark.parametrize("counts", SPLITS, ids=str)
def test_it_is_the_gradient_of_the_joined_batch(counts: list[int]) -> None:
    given = own_gradients(counts)
    found = exercise.joined_gradients(own_gradients(counts), counts)
    check(found, gradients_of(make_net(), *samples()), given)


def test_the_gradients_of_the_ranks_stay_as_they_are() -> None:
    given, before = own_gradients([9, 3]), own_gradients([9, 3])
    exercise.joined_gradients(given, [9, 3])
    for rank, (own, earlier) in enumerate(zip(given, before, strict=True)):
        for name in earlier:
            check_close(own[name], earlier[name], f"{name} that rank {rank} gave")


def test_float16_does_not_overflow() -> None:
    given = [{"weight": torch.tensor([value], dtype=torch.float16)} for value in (60_000, 30_000)]
    found = exercise.joined_gradients(given, [200, 100])["weight"]
    assert found.dtype is torch.float16
    assert found.item() == pytest.approx(50_000, rel=1e-3)


def test_no_samples_at_all() -> None:
    given = [{"weight": torch.zeros(2)}] * 2
    try:
        found = exercise.joined_gradients(given, [0, 0])
    except ValueError:
        return
    pytest.fail(f"no rank has a sample, and no ValueError: {found}")


def train(rank: int, counts: Sequence[int]) -> list[Tensor]:
    """Three SGD steps on this rank's samples; the ranks send each other their gradients."""
    net = make_net()
    inputs, labels = (tensor.split(list(counts))[rank] for tensor in samples())
    for _ in range(3):
        everyone: list = [None] * len(counts)
        dist.all_gather_object(everyone, gradients_of(net, inputs, labels))
        joined = exercise.joined_gradients(everyone, counts)
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                parameter -= 0.5 * joined[name]
    return [parameter.detach() for parameter in net.parameters()]


def test_ranks_with_unequal_counts_train_as_one_process() -> None:
    alone = run_ranks(train, 1, [12], timeout=30)[0]
    ranks = run_ranks(train, 3, [7, 4, 1], timeout=30)
    for weights in ranks:
        torch.testing.assert_close(weights, alone)
    for other in ranks[1:]:
        assert all(torch.equal(a, b) for a, b in zip(ranks[0], other, strict=True))
