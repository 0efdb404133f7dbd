"""Lines that only run on a GPU, run here with stand-ins: what they call and in which order.

The stand-ins are functions of `torch.cuda` that say what they were asked for, torch's fake process
group, which moves nothing, and tensors on the meta device, which hold nothing. What a GPU computes
is tested by `make test-gpu`.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from miniddp import hooks, ring
from miniddp.checkpoint import random_state, set_random_state
from miniddp.process import destroy_process_group, device, init_process_group
from miniddp.training_step import check_amp

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


def test_ranks_that_share_a_gpu_take_gloo(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    init_process_group()
    assert calls == [torch.device("cuda", 1), ("gloo", None)]


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
    assert all(buffer.is_meta for buffer in ring.landing_buffers(parts[0]))


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
