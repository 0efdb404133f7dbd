"""Ranks, groups, devices and seeds."""

import os
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from miniddp import process
from miniddp.launch import RankResults, run_ranks
from miniddp.process import check_group, destroy_process_group, get, init_process_group, set_seed

NAMES = ("rank", "grank", "lrank", "ws")


def message(function: Any, *args: Any) -> str:
    try:
        function(*args)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def ask(rank: int) -> dict[str, Any]:
    """Everything about four ranks on a 2 x 2 mesh: columns are {0, 2} and {1, 3}."""
    os.environ |= {"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"}  # as on two machines
    init_process_group()
    answers: dict[str, Any] = {"plain": [get(name) for name in NAMES]}
    answers["backend"] = dist.get_backend()
    answers["plain members"] = dist.get_process_group_ranks(get("pg"))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    answers["passed"] = [get(name, mesh["replica"]) for name in NAMES]
    answers["two dimensions"] = message(get, "rank", mesh)
    get.register_mesh(mesh["replica"])
    answers["registered"] = [get(name) for name in NAMES]
    answers["members"] = dist.get_process_group_ranks(get("pg"))
    answers["other mesh wins"] = [get(name, mesh["shard"]) for name in NAMES]
    get.register_mesh(None)
    answers["forgotten"] = [get(name) for name in NAMES]
    answers["unknown"] = message(get, "world")
    only_zero = dist.new_group([0])
    answers["outsider"] = message(check_group, only_zero)
    get.register_mesh(mesh["replica"])
    destroy_process_group()
    answers["after the end"] = message(get, "rank")
    return answers


@pytest.fixture(scope="module")
def answers() -> RankResults:
    return run_ranks(ask, 4, backend=None)


def test_get_without_a_mesh(answers: RankResults) -> None:
    for rank, answer in enumerate(answers):
        assert answer["plain"] == answer["forgotten"] == [rank, rank, rank % 2, 4]
        assert answer["plain members"] == [0, 1, 2, 3]
        assert answer["backend"] == "gloo"


def test_get_with_a_mesh(answers: RankResults) -> None:
    for rank, answer in enumerate(answers):
        row, column = divmod(rank, 2)
        assert answer["passed"] == answer["registered"] == [row, rank, row, 2]
        assert answer["other mesh wins"] == [column, rank, column, 2]
        assert answer["members"] == [column, column + 2]


def test_get_says_what_is_wrong_on_every_rank(answers: RankResults) -> None:
    for answer in answers:
        assert answer["unknown"] == (
            "ValueError: get knows rank, grank, lrank, ws and pg, not 'world'"
        )
        assert "this one has 2: pass one of ('replica', 'shard')" in answer["two dimensions"]
        assert answer["after the end"].startswith("RuntimeError: there is no process group: call")


def test_check_group_knows_its_members(answers: RankResults) -> None:
    assert answers[0]["outsider"] == "no error"
    for rank in (1, 2, 3):
        expected = f"ValueError: rank {rank} is not a member of the process group it passed"
        assert answers[rank]["outsider"] == expected


def test_nothing_works_without_a_process_group() -> None:
    with pytest.raises(RuntimeError, match="there is no process group: call"):
        get("rank")
    with pytest.raises(ValueError, match="not 'world'"):
        get("world")
    with pytest.raises(RuntimeError, match="there is no process group"):
        check_group()


def test_start_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RuntimeError, match="RANK is not set: start this program with torchrun"):
        init_process_group()


def test_start_by_hand() -> None:
    init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert [get(name) for name in NAMES] == [0, 0, 0, 1]
    finally:
        destroy_process_group()
    assert not dist.is_initialized()
    destroy_process_group()


def test_nccl_needs_a_gpu_for_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    chosen = [process._backend(ranks, gpus) for ranks, gpus in [(1, 0), (1, 1), (2, 1), (2, 4)]]
    assert chosen == ["gloo", "nccl", "gloo", "nccl"]
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert process._backend(1, 1) == "gloo"


def test_device_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "5")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert process.device() == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert process.device() == torch.device("cuda", 1)


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), torch.rand(()).item()]


def test_a_seed_repeats_and_an_offset_differs() -> None:
    set_seed(7)
    first = draw()
    set_seed(7, rank_offset=1)
    offset = draw()
    set_seed(7)
    assert draw() == first
    assert all(a != b for a, b in zip(first, offset, strict=True))


@pytest.mark.parametrize("seed", [-1, 2**32, 2**40 + 3])
def test_any_integer_is_a_seed(seed: int) -> None:
    set_seed(seed)
    first = draw()
    set_seed(seed)
    assert draw() == first
