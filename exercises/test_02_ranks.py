"""When `exercises/02_ranks.py` is right: the groups, the sum, and who talks to whom."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import load

from miniddp import run_ranks

exercise = load("02_ranks")
COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
)


def node_of(rank: int, ranks_per_node: int, world_size: int) -> list[int]:
    first = rank - rank % ranks_per_node
    return list(range(first, min(first + ranks_per_node, world_size)))


def members(rank: int, ranks_per_node: int) -> tuple[list[int], list[int] | None]:
    node, leaders = exercise.make_groups(ranks_per_node)
    dist.barrier()
    of_node, of_leaders = (
        group if group is None else dist.get_process_group_ranks(group) for group in (node, leaders)
    )
    return of_node, of_leaders


def add_up(rank: int, ranks_per_node: int) -> tuple[list[list[int]], list[float], bool]:
    """The members of every collective that this rank called, its result, and whether in place."""
    node, leaders = exercise.make_groups(ranks_per_node)
    dist.barrier()
    tensor = torch.full((3,), 10.0**rank)
    address = tensor.data_ptr()
    called: list[list[int]] = []

    def watched(collective: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            groups = [value for value in args if isinstance(value, dist.ProcessGroup)]
            group = kwargs.get("group") or next(iter(groups), None)
            called.append(dist.get_process_group_ranks(group))
            return collective(*args, **kwargs)

        return call

    wrapped = {name: watched(getattr(dist, name)) for name in COLLECTIVES}
    with mock.patch.multiple(dist, **wrapped):
        exercise.all_reduce(tensor, node, leaders)
    dist.barrier()
    return called, tensor.tolist(), tensor.data_ptr() == address


@pytest.mark.parametrize(("world_size", "ranks_per_node"), [(1, 1), (2, 2), (4, 2), (3, 2), (5, 3)])
def test_every_rank_gets_its_groups(world_size: int, ranks_per_node: int) -> None:
    results = run_ranks(members, world_size, ranks_per_node, timeout=30)
    leaders = list(range(0, world_size, ranks_per_node))
    for rank, (node, found) in enumerate(results):
        assert node == node_of(rank, ranks_per_node, world_size), f"the node of rank {rank}"
        assert found == (leaders if rank in leaders else None), f"the leaders, on rank {rank}"


@pytest.mark.parametrize(("world_size", "ranks_per_node"), [(1, 1), (2, 2), (4, 2), (3, 2), (5, 3)])
def test_every_rank_gets_the_sum(world_size: int, ranks_per_node: int) -> None:
    results = run_ranks(add_up, world_size, ranks_per_node, timeout=30)
    total = sum(10.0**rank for rank in range(world_size))
    for rank, (_, values, in_place) in enumerate(results):
        assert values == [total] * 3, f"the sum on rank {rank}"
        assert in_place, f"rank {rank} got the sum in another tensor"


def test_only_leaders_talk_to_other_nodes() -> None:
    results = run_ranks(add_up, 4, 2, timeout=30)
    for rank, (called, _, _) in enumerate(results):
        across = [ranks for ranks in called if len({member // 2 for member in ranks}) > 1]
        assert called, f"rank {rank} called no collective"
        if rank in (0, 2):
            assert across == [[0, 2]], f"between the nodes, rank {rank} called {across}"
        else:
            assert across == [], f"rank {rank} is no leader, and called {across}"
