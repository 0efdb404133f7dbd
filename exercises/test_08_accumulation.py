"""When `exercises/08_accumulation.py` is right: compared with one process that has all tokens."""

import pytest
import torch
from harness import load
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from miniddp import run_ranks

exercise = load("08_accumulation")
WORDS = 13
SIZES = {1: [[3, 5]], 2: [[2, 7, 1], [4, 4, 9]], 3: [[5], [1], [12]]}


class BadBatchError(Exception):
    """Raised by a loss."""


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, 5), nn.Linear(5, WORDS)).double()


def batches_of(rank: int, sizes: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(WORDS, (size,), generator=generator) for size in sizes]


def mean_loss(net: nn.Module, words: Tensor) -> Tensor:
    return nn.functional.cross_entropy(net(words), (words * 5 + 2) % WORDS)


def train(rank: int, sizes: list[list[int]]) -> tuple[list[Tensor], int]:
    """The gradients, and the number of all-reduces of one step after the first."""
    ddp = DistributedDataParallel(make_net())
    calls = []

    def count(state: None, bucket):
        calls.append(bucket.index())
        return allreduce_hook(None, bucket)

    ddp.register_comm_hook(None, count)
    for _ in range(2):
        ddp.zero_grad()
        calls.clear()
        exercise.accumulate(ddp, mean_loss, batches_of(rank, sizes[rank]))
    return [parameter.grad for parameter in ddp.parameters()], len(calls)


def train_with_an_error(rank: int) -> bool:
    def refuse(net: nn.Module, words: Tensor) -> Tensor:
        raise BadBatchError

    ddp = DistributedDataParallel(make_net())
    with pytest.raises(BadBatchError):
        exercise.accumulate(ddp, refuse, batches_of(rank, [3, 3]))
    return ddp.require_backward_grad_sync


@pytest.mark.parametrize("world_size", SIZES)
def test_every_token_counts_the_same(world_size: int) -> None:
    sizes = SIZES[world_size]
    net = make_net()
    joined = [torch.cat(batches_of(rank, sizes[rank])) for rank in range(world_size)]
    mean_loss(net, torch.cat(joined)).backward()
    for rank, (found, _) in enumerate(run_ranks(train, world_size, sizes, timeout=30)):
        for (name, parameter), gradient in zip(net.named_parameters(), found, strict=True):
            torch.testing.assert_close(
                gradient,
                parameter.grad,
                msg=lambda text, where=f"{name} on rank {rank}": f"{where}: {text}",
            )


def test_gradients_are_sent_once() -> None:
    for _, all_reduces in run_ranks(train, 2, SIZES[2], timeout=30):
        assert all_reduces == 1, f"{all_reduces} all-reduces in a step, expected 1"


def test_an_error_leaves_the_synchronisation_on() -> None:
    assert run_ranks(train_with_an_error, 2, timeout=30) == [True, True]
