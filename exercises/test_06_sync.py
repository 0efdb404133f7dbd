"""When `exercises/06_sync.py` is right: its gradients against one process with all the data."""

import pytest
import torch
import torch.distributed as dist
from harness import check_close, load
from torch import Tensor, nn

from miniddp import run_ranks

exercise = load("06_sync")
WORDS = 11
Gradients = dict[str, Tensor | None]


class Net(nn.Module):
    """The embedding is tied to the output; `frozen` is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.hidden = nn.Linear(6, 6)
        self.head = nn.Linear(6, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.hidden(self.frozen(self.embed(words))).tanh())


def make_net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batch_of(rank: int, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + number)
    return tuple(torch.randint(WORDS, (4,), generator=generator) for _ in range(2))


def backward(net: Net, ranks: list[int], number: int) -> None:
    """One backward pass on the batches of these ranks, joined."""
    words, targets = map(torch.cat, zip(*(batch_of(rank, number) for rank in ranks), strict=True))
    nn.functional.cross_entropy(net(words), targets).backward()


def gradients(net: Net) -> Gradients:
    named = net.named_parameters()
    return {name: None if p.grad is None else p.grad.clone() for name, p in named}


def expected(ranks: list[int], numbers: list[int]) -> Gradients:
    net = make_net()
    for number in numbers:
        backward(net, ranks, number)
    return gradients(net)


def train(rank: int, numbers: list[int]) -> Gradients:
    """Backward passes without `zero_grad` between them."""
    net = make_net()
    exercise.average_with_hooks(net)
    for number in numbers:
        backward(net, [rank], number)
    return gradients(net)


def train_in_a_group(rank: int) -> Gradients:
    """Ranks 0 and 2 of three train together; rank 1 trains alone, without hooks."""
    group = dist.new_group([0, 2])
    net = make_net()
    if rank != 1:
        exercise.average_with_hooks(net, group)
    backward(net, [rank], 0)
    return gradients(net)


def check(found: Gradients, wanted: Gradients, rank: int, numbers: list[int]) -> None:
    alone = expected([rank], numbers)
    for name, gradient in wanted.items():
        where = f"{name} on rank {rank}"
        if gradient is None:
            assert found[name] is None, f"{where} is frozen, expected no gradient"
        else:
            assert found[name] is not None, f"{where} has no gradient"
            mistakes = {"this rank's own gradient, not the mean": alone[name]}
            check_close(found[name], gradient, where, mistakes)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_backward_leaves_the_mean(world_size: int) -> None:
    wanted = expected(list(range(world_size)), [0])
    for rank, found in enumerate(run_ranks(train, world_size, [0], timeout=30)):
        check(found, wanted, rank, [0])


def test_a_second_backward_adds_another_mean() -> None:
    wanted = expected([0, 1], [0, 1])
    for rank, found in enumerate(run_ranks(train, 2, [0, 1], timeout=30)):
        check(found, wanted, rank, [0, 1])


def test_only_the_ranks_of_the_group_take_part() -> None:
    results = run_ranks(train_in_a_group, 3, timeout=30)
    for rank, ranks in enumerate([[0, 2], [1], [0, 2]]):
        check(results[rank], expected(ranks, [0]), rank, [0])
