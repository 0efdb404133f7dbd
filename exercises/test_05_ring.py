"""When `exercises/05_ring.py` is right: its schedule on paper, then its sums and its messages."""

import pytest
import torch
import torch.distributed as dist
from harness import check_close, load
from torch import Tensor

from miniddp import run_ranks

exercise = load("05_ring")

SIZES = range(2, 8)


def check_neighbours(steps: list[list[tuple[int, int]]]) -> None:
    """Whether each rank, by its (send, receive) of each step, receives what its left one sends."""
    size = len(steps)
    for rank in range(size):
        sent = [send for send, _ in steps[(rank - 1) % size]]
        received = [receive for _, receive in steps[rank]]
        assert received == sent, f"rank {rank} of {size}, and what its left neighbour sends"
        assert len(received) == size - 1


@pytest.mark.parametrize("size", SIZES)
def test_in_reduce_scatter_a_rank_receives_what_its_left_neighbour_sends(size: int) -> None:
    check_neighbours([exercise.reduce_scatter_steps(rank, size) for rank in range(size)])


@pytest.mark.parametrize("size", SIZES)
def test_reduce_scatter_completes_the_chunk_numbered_like_the_rank(size: int) -> None:
    added = [[{rank} for _ in range(size)] for rank in range(size)]  # added[rank][chunk]: by whom
    for step in range(size - 1):
        moves = [exercise.reduce_scatter_steps(rank, size)[step] for rank in range(size)]
        under_way = [set(added[rank][send]) for rank, (send, _) in enumerate(moves)]
        for rank, (_, receive) in enumerate(moves):
            arrived = under_way[(rank - 1) % size]
            twice = added[rank][receive] & arrived
            assert not twice, f"step {step}: rank {rank} adds rank {twice.pop()}'s numbers twice"
            added[rank][receive] |= arrived
    for rank in range(size):
        assert added[rank][rank] == set(range(size)), f"chunk {rank} on rank {rank} is incomplete"


@pytest.mark.parametrize("size", SIZES)
def test_in_all_gather_a_rank_receives_what_its_left_neighbour_sends(size: int) -> None:
    check_neighbours([exercise.all_gather_steps(rank, size) for rank in range(size)])


@pytest.mark.parametrize("size", SIZES)
def test_all_gather_sends_complete_chunks_only(size: int) -> None:
    complete = [{rank} for rank in range(size)]
    for step in range(size - 1):
        moves = [exercise.all_gather_steps(rank, size)[step] for rank in range(size)]
        for rank, (send, _) in enumerate(moves):
            assert send in complete[rank], f"step {step}: rank {rank} has no complete chunk {send}"
        for rank, (_, receive) in enumerate(moves):
            complete[rank].add(receive)
    assert complete == [set(range(size))] * size


def own(rank: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * length + rank)
    return torch.randn(length, generator=generator, dtype=torch.float64)


def reduced(rank: int, length: int) -> tuple[Tensor, list[int]]:
    """The tensor after `all_reduce`, and the bytes of each message that this rank sent."""
    messages: list[int] = []
    send = dist.ProcessGroup.send

    def counted(group: dist.ProcessGroup, tensors: list[Tensor], *arguments: int) -> dist.Work:
        messages.append(sum(tensor.nbytes for tensor in tensors))
        return send(group, tensors, *arguments)

    dist.ProcessGroup.send = counted
    tensor = own(rank, length)
    exercise.all_reduce(tensor)
    return tensor, messages


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("length", [1, 5000])
def test_every_rank_holds_the_sum(size: int, length: int) -> None:
    total = size * length
    expected = sum(own(rank, total) for rank in range(size))
    results = run_ranks(reduced, size, total, timeout=20)
    for rank, (tensor, messages) in enumerate(results):
        check_close(tensor, expected, f"the tensor on rank {rank} of {size}")
        assert torch.equal(tensor, results[0][0]), f"rank {rank} differs from rank 0 by rounding"
        chunks = [8 * length] * (2 * (size - 1))
        assert messages == chunks, f"rank {rank} sent other messages than one chunk in each step"
