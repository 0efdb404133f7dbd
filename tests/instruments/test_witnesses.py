import os
import signal

import torch
import torch.distributed as dist

from instruments.witnesses import gist, say, short, witnesses_of


def one_dies(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def one_raises(rank: int) -> None:
    if rank == 1:
        raise ValueError("row 4711 has no label")
    dist.all_reduce(torch.ones(1))


def one_is_elsewhere(rank: int) -> None:
    tensor = torch.ones(2 if rank == 1 else 1)
    dist.all_reduce(tensor)


def nothing_is_wrong(rank: int) -> None:
    dist.all_reduce(torch.ones(1))
    say(f"rank {rank} has a result")


def test_a_rank_that_was_killed_is_told_from_those_that_lost_it():
    said = witnesses_of(one_dies)
    assert gist(said[1]) == "killed by SIGKILL"
    assert all("by peer" in gist(said[rank]) for rank in (0, 2))


def test_a_rank_that_raises_says_its_own_error():
    said = witnesses_of(one_raises)
    assert " ".join(said[1].split()) == "own error: ValueError: row 4711 has no label"
    assert all("by peer" in gist(said[rank]) for rank in (0, 2))


def test_in_detail_the_ranks_compare_their_calls():
    for text in witnesses_of(one_is_elsewhere, detail=True):
        assert "Detected mismatch" in " ".join(text.split())
        assert "TensorShape=[2]" in text


def test_without_a_fault_nobody_says_an_error():
    said = witnesses_of(nothing_is_wrong)
    assert said == [f"rank {rank} has a result" for rank in range(3)]
    assert {gist(text) for text in said} == {"no error"}


def test_an_error_is_shortened_to_what_one_searches_for():
    text = (
        "[/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
        "[127.0.0.1]:29056. This is typically caused by a remote worker crashing."
    )
    assert short(RuntimeError(text)) == "RuntimeError: Connection closed by peer [127.0.0.1]."
    assert gist("RuntimeError: Timed out\n  waiting 2000ms") == "Timed out waiting"
