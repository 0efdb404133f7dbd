"""Lines that only run on a GPU, run here with stand-ins: what they call and in which order.

The stand-ins are functions of `torch.cuda` that say what they were asked for, torch's fake process
group, which moves nothing, and tensors on the meta device, which hold nothing. What a GPU computes
is tested by `make test-gpu`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from miniddp import hooks, ring, sampler
from miniddp.zero import ShardedOptimizer

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")


@pytest.fixture
def second_of_two() -> Iterator[None]:
    """Rank 1 of two, in a group that also takes tensors of the meta device."""
    dist.init_process_group("cpu:fake,meta:fake", rank=1, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


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
    monkeypatch.setattr(dist, "send_object_list", collective)
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
