"""When `exercises/13_machines.py` is right: who is missing, and who has another plan."""

import os
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from harness import load

from miniddp import run_ranks

exercise = load("13_machines")
PLANS = ["all_reduce", "all_reduce", "broadcast", "all_reduce"]


class SlowStore(dist.TCPStore):
    def wait(self, keys: list[str], timeout: timedelta) -> None:
        time.sleep(0.3)
        super().wait(keys, timeout)


def connect(kind: type[dist.TCPStore] = dist.TCPStore) -> dist.Store:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return kind(address, port, is_master=False, timeout=timedelta(seconds=20))


def answer(store: dist.Store, rank: int, plan: str, seconds: float, name: str = "roll") -> str:
    """The error of a roll call of all ranks, or an empty text."""
    world_size = int(os.environ["WORLD_SIZE"])
    try:
        exercise.call_the_roll(store, name, rank, world_size, plan, timedelta(seconds=seconds))
    except exercise.RollCallError as error:
        return str(error)
    return ""


def come_late(rank: int) -> str:
    store = connect()
    time.sleep(0.3 * rank)
    return answer(store, rank, "all_reduce", 20)


def stay_away(rank: int, absent: list[int]) -> str:
    """Those that came have two plans where rank 2 is among them."""
    store = connect()
    if rank in absent:
        store.wait(["all done"])
        return "absent"
    text = answer(store, rank, PLANS[rank], 2)
    if store.add("came", 1) == int(os.environ["WORLD_SIZE"]) - len(absent):
        store.set("all done", "")
    return text


def come_around_the_deadline(rank: int, delays: list[float]) -> str:
    store = connect()
    store.add("connected", 1)
    while store.add("connected", 0) < len(delays):
        time.sleep(0.01)
    time.sleep(delays[rank])
    return answer(store, rank, "all_reduce", 0.4)


def follow(rank: int, plans: list[str]) -> str:
    """Rank 0 is slow, so that another one decides."""
    store = connect(SlowStore if rank == 0 else dist.TCPStore)
    return answer(store, rank, plans[rank], 20)


def twice(rank: int, second: list[str]) -> list[str]:
    store = connect()
    first = answer(store, rank, "all_reduce", 20, "first")
    return [first, answer(store, rank, second[rank], 20, "second")]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_come_even_if_late(world_size: int) -> None:
    assert run_ranks(come_late, world_size, backend=None, timeout=40) == [""] * world_size


@pytest.mark.parametrize(("world_size", "absent"), [(2, [1]), (3, [0]), (4, [1, 3])])
def test_every_rank_that_came_names_those_that_are_missing(
    world_size: int, absent: list[int]
) -> None:
    names = ", ".join(map(str, absent))
    for rank, text in enumerate(run_ranks(stay_away, world_size, absent, backend=None, timeout=40)):
        wanted = "absent" if rank in absent else f"missing: ranks {names}"
        assert text == wanted, f"rank {rank}"


class WatchedStore(dist.HashStore):
    """Remembers for how many seconds it was asked to wait in vain."""

    def __init__(self) -> None:
        super().__init__()
        self.in_vain = 0.0

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        try:
            super().wait(keys, timeout)
        except dist.DistStoreError:
            self.in_vain += timeout.total_seconds()
            raise


def test_the_missing_ranks_share_one_deadline() -> None:
    store = WatchedStore()
    with pytest.raises(exercise.RollCallError, match="missing: ranks 1, 2, 3"):
        exercise.call_the_roll(store, "roll", 0, 4, "all_reduce", timedelta(seconds=0.5))
    seconds = store.in_vain
    assert seconds < 1, f"three ranks are missing; the waits of 0.5 s add up to {seconds:g} s"


@pytest.mark.parametrize("delays", [[0, 0.6, 0.3], [0.5, 0.1, 0], [0.9, 0, 0.4]])
def test_all_hear_the_same_however_late_they_come(delays: list[float]) -> None:
    verdicts = run_ranks(come_around_the_deadline, 3, delays, backend=None, timeout=40)
    assert len(set(verdicts)) == 1, f"the ranks heard {verdicts}"


@pytest.mark.parametrize(
    ("plans", "odd"),
    [
        (["all_reduce", "broadcast", "all_reduce"], 1),
        (["all_reduce", "all_reduce", "broadcast"], 2),
        (["all_reduce", "broadcast", "barrier"], 1),
    ],
)
def test_every_rank_names_the_first_other_plan(plans: list[str], odd: int) -> None:
    wanted = f"rank {odd}: broadcast, rank 0: all_reduce"
    for rank, text in enumerate(run_ranks(follow, 3, plans, backend=None, timeout=40)):
        assert text == wanted, f"rank {rank}"


def test_a_roll_call_can_be_repeated() -> None:
    plans = ["barrier", "all_reduce"]
    for first, second in run_ranks(twice, 2, plans, backend=None, timeout=40):
        assert first == ""
        assert second == "rank 1: all_reduce, rank 0: barrier"
