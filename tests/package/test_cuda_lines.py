"""Lines that only run on a GPU, run here with stand-ins: what they call and in which order.

The stand-ins are functions of `torch.cuda` that say what they were asked for, torch's fake process
group, which moves nothing, and tensors on the meta device, which hold nothing. What a GPU computes
is tested by `make test-gpu`.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from finetune.checkpoint import random_state, set_random_state
from finetune.training_step import check_amp
from miniddp import hooks, ring, sampler
from miniddp.process import destroy_process_group, device, init_process_group
from miniddp.zero import ShardedOptimizer

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A machine with two GPUs. What torch is asked for, in order."""
    asked: list[Any] = []

    def init(backend: str, **options: Any) -> None:
        asked.append((backend, options.get("device_id")))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", asked.append)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "init_process_group", init)
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return asked


def test_the_gpu_is_chosen_before_the_group_starts_and_given_to_it(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    init_process_group()
    second = torch.device("cuda", 1)
    assert calls == [second, ("nccl", second)]
    assert device() == second


def test_ranks_that_share_a_gpu_take_gloo_and_one_of_them_says_so(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        init_process_group()
    assert calls[-2:] == [torch.device("cuda", 1), ("gloo", None)]
    (said,) = caplog.records
    assert said.levelno == logging.WARNING
    assert said.getMessage().startswith("4 ranks of this machine see 2 GPUs: gloo, not nccl")


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_backend_that_was_asked_for_needs_no_word(
    calls: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    backend: str,
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    init_process_group(backend, rank=0)
    assert calls[-1][0] == backend
    assert not caplog.records


def test_a_rank_that_was_started_by_hand_takes_the_gpu_of_its_number(calls: list[Any]) -> None:
    init_process_group(rank=9, world_size=16, init_method="tcp://node0.example:29500")
    assert calls == [torch.device("cuda", 1), ("nccl", torch.device("cuda", 1))]


@pytest.fixture
def second_of_two() -> Iterator[None]:
    """Rank 1 of two, in a group that also takes tensors of the meta device."""
    init_process_group("cpu:fake,meta:fake", rank=1, world_size=2, store=FakeStore())
    yield
    destroy_process_group()


@pytest.mark.usefixtures("second_of_two")
def test_the_ring_sends_a_gpus_tensors_from_where_they_are() -> None:
    with torch.device("meta"):
        parts = [torch.empty(6, 5).t() for _ in range(2)]
        assert ring.all_reduce(torch.empty(1000)) == ring.root_all_reduce(torch.empty(1000)) == 4000
        assert ring.reduce_scatter(torch.empty(5, 6), parts) == 120
        assert ring.all_gather(parts, torch.empty(5, 6)) == 120


@pytest.mark.usefixtures("second_of_two")
def test_objects_travel_while_the_gpu_of_the_parameters_is_the_current_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL sends them from the current GPU, which need not be this rank's."""
    current, used = [torch.device("cpu")], []

    @contextmanager
    def device_of(tensor: torch.Tensor) -> Iterator[None]:
        current.append(tensor.device)
        yield
        current.pop()

    def collective(*_: Any, **__: Any) -> None:
        used.append(current[-1].type)

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(dist, "all_gather_object", collective)
    monkeypatch.setattr(dist, "gather_object", collective)
    with torch.device("meta"):
        optimizer = ShardedOptimizer(torch.nn.Linear(2, 2).parameters(), torch.optim.SGD, lr=0.1)
    optimizer.consolidate_state_dict()
    assert used == ["meta", "meta"]


@pytest.mark.usefixtures("second_of_two")
def test_numbers_of_steps_travel_from_the_gpu_of_this_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[torch.device] = []
    monkeypatch.setattr(sampler, "device", lambda: torch.device("meta"))
    monkeypatch.setattr(dist, "all_reduce", lambda counts, group: used.append(counts.device))
    with pytest.raises(NotImplementedError, match="meta"):  # there are no numbers to compare
        sampler.check_equal_steps(3)
    assert used == [torch.device("meta")]


def test_the_random_state_holds_that_of_the_gpu(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_gpu = torch.arange(3)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: of_gpu)
    monkeypatch.setattr(torch.cuda, "set_rng_state", calls.append)
    set_random_state(random_state())
    (restored,) = calls
    assert restored is of_gpu


@pytest.mark.parametrize("supported", [True, False])
def test_a_gpu_without_bf16_is_told_before_training(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch, supported: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: supported)
    check_amp("fp16")
    if supported:
        check_amp("bf16")
        return
    with pytest.raises(ValueError, match="this GPU has none, use fp16 or off"):
        check_amp("bf16")


def test_the_future_of_a_hook_knows_the_gpu_whose_streams_it_orders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Future(SimpleNamespace):
        def set_result(self, value: Any) -> None:
            self.value = value

    monkeypatch.setattr(hooks, "Future", Future)
    buffer = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1))
    future = hooks.noop_hook(None, SimpleNamespace(buffer=lambda: buffer))
    assert (future.devices, future.value) == ([torch.device("cuda", 1)], buffer)
