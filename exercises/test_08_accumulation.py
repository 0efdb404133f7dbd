"""When `exercises/08_accumulation.py` is right: compared with one process that has all tokens."""

import pytest
import torch
from harness import check_close, load
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


def gradients_of(batches: list[Tensor]) -> dict[str, Tensor]:
    """Of the mean over `batches` of their mean losses, in one process."""
    net = make_net()
    for batch in batches:
        (mean_loss(net, batch) / len(batches)).backward()
    return {name: parameter.grad for name, parameter in net.named_parameters()}


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
    batches = [batch for rank in range(world_size) for batch in batches_of(rank, sizes[rank])]
    wanted = gradients_of([torch.cat(batches)])
    alike = gradients_of(batches)
    results = run_ranks(train, world_size, sizes, timeout=30)
    for rank, (found, _) in enumerate(results):
        for name, gradient, of_rank_0 in zip(wanted, found, results[0][0], strict=True):
            where = f"{name} on rank {rank}"
            assert torch.equal(gradient, of_rank_0), f"{where} is not that of rank 0"
            mistakes = {"what comes if each micro-batch counts the same": alike[name]}
            check_close(gradient, wanted[name], where, mistakes)


def test_gradients_are_sent_once() -> None:
    for _, all_reduces in run_ranks(train, 2, SIZES[2], timeout=30):
        assert all_reduces == 1, f"{all_reduces} all-reduces in a step, expected 1"


def test_an_error_leaves_the_synchronisation_on() -> None:
    for synchronises in run_ranks(train_with_an_error, 2, timeout=30):
        assert synchronises, "after an error in a micro-batch `ddp` no longer synchronises"
