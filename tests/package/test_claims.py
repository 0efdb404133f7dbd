"""What the pages say of torch, each held by a small program: the docstring names the place."""

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.profiler import ProfilerAction, schedule
from torch.utils.data import DistributedSampler

from .ranks import all_gather, run


def on_ranks(case: Callable[[int], Any], world_size: int = 2) -> list[Any]:
    return list(run(quietly, world_size, case, timeout=60))


def quietly(rank: int, case: Callable[[int], Any]) -> Any:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    return case(rank)


def batch(rank: int) -> Tensor:
    return torch.full((2, 3), 1.0 + rank)


# Averages


def half_gradients(rank: int) -> tuple[Tensor, Tensor]:
    """The weight's gradient of a sum is its input."""
    large = DistributedDataParallel(nn.Linear(1, 1, bias=False).half())
    large(torch.full((1, 1), 60_000.0).half()).sum().backward()
    small = DistributedDataParallel(nn.Linear(1, 1, bias=False).half())
    smallest = torch.tensor([[2.0**-24]]).half()
    small(smallest).sum().backward()
    undivided = torch.full((1,), 60_000.0).half()
    dist.all_reduce(undivided)
    assert undivided.isinf(), "claims: the sum overflows before the division can help"
    return large.module.weight.grad, small.module.weight.grad


def test_torch_divides_float16_first() -> None:
    """claims#sec-claims-divide, 06-sync#sec-sync-divide"""
    for large, small in on_ranks(half_gradients):
        assert large.item() == pytest.approx(60_000, rel=1e-3)
        assert small.item() == 0, "the smallest float16 above zero, halved, is rounded to zero"


def test_adamw_hides_a_constant_factor() -> None:
    """claims#sec-claims-undivided: and neither SGD nor the norm by which you clip does."""
    moved: dict[tuple[type, float], float] = {}
    for optimizer_type in (torch.optim.AdamW, torch.optim.SGD):
        for factor in (1.0, 4.0):
            weight = nn.Parameter(torch.ones(1))
            optimizer = optimizer_type([weight], lr=1e-3)
            weight.grad = torch.full((1,), 0.5 * factor)
            assert clip_grad_norm_([weight], 10).item() == 0.5 * factor
            optimizer.step()
            moved[optimizer_type, factor] = 1 - weight.item()
    assert moved[torch.optim.AdamW, 4.0] == pytest.approx(moved[torch.optim.AdamW, 1.0], rel=1e-3)
    assert moved[torch.optim.SGD, 4.0] == pytest.approx(4 * moved[torch.optim.SGD, 1.0], rel=1e-3)


# Hooks of parameters


def test_one_kind_of_hook_comes_before_the_addition() -> None:
    """06-sync#sec-sync-hooks: and the other after it."""
    weight = nn.Parameter(torch.ones(1))
    seen: list[tuple[str, Any]] = []
    weight.register_hook(lambda gradient: seen.append(("before", weight.grad)))
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(("after", p.grad.item())))
    (3 * weight).backward()
    assert seen == [("before", None), ("after", 3.0)]


def test_in_a_hook_autograd_does_not_record() -> None:
    """06-sync: so no error warns you when a hook changes the weights in place."""
    weight = nn.Parameter(torch.ones(1))
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        weight.mul_(2)
    weight.register_post_accumulate_grad_hook(lambda p: p.mul_(2))
    (3 * weight).backward()
    assert weight.item() == 2
    assert weight.grad is not None
    assert weight.grad.item() == 3


# Replicas


def test_equal_seeds_give_equal_masks() -> None:
    """claims#sec-claims-seed, 04-replicas#sec-replicas-masks"""
    first, second = on_ranks(lambda rank: nn.Dropout(0.5)(torch.ones(64)))
    assert torch.equal(first, second)


class Counted(nn.Module):
    """Its buffer holds the rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.line = nn.Linear(3, 1)
        self.register_buffer("value", torch.tensor([float(rank)]))

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x)


def buffers(rank: int, options: dict[str, bool]) -> list[float]:
    """After wrapping, and after a forward before which each rank set its own."""
    module = Counted(rank)
    ddp = DistributedDataParallel(module, **options)
    wrapped = module.value.item()
    module.value.fill_(10 + rank)
    ddp(batch(rank)).sum().backward()
    return [wrapped, module.value.item()]


@pytest.mark.parametrize(
    ("options", "of_rank_1"),
    [
        ({}, [0, 10]),
        ({"forward_sync_buffers": False}, [0, 11]),
        ({"broadcast_buffers": False}, [1, 11]),
    ],
)
def test_forward_sends_buffers(options: dict[str, bool], of_rank_1: list[float]) -> None:
    """claims#sec-claims-forward, 04-replicas#sec-replicas-buffers"""
    assert on_ranks(lambda rank: buffers(rank, options)) == [[0, 10], of_rank_1]


def deprecated(rank: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DistributedDataParallel(nn.Linear(1, 1), broadcast_buffers=False)
    return [str(warning.message) for warning in caught]


def test_broadcast_buffers_is_deprecated() -> None:
    """claims#sec-claims-forward"""
    messages = on_ranks(deprecated, 1)[0]
    assert any("broadcast_buffers" in message for message in messages), messages


def without_gradients(rank: int) -> list[float]:
    """The buffer after two forwards under `no_grad`, of which the first follows a backward."""
    module = Counted(rank)
    ddp = DistributedDataParallel(module)
    ddp(batch(rank)).sum().backward()
    seen = []
    for _ in range(2):
        module.value.fill_(10 + rank)
        with torch.no_grad():
            ddp(batch(rank))
        seen.append(module.value.item())
    return seen


def test_each_forward_decides_whether_the_next_one_sends_buffers() -> None:
    """claims#sec-claims-slips-run: "Under `no_grad` nothing is sent.\""""
    assert on_ranks(without_gradients) == [[10, 10], [10, 11]]


def added_after_wrapping(rank: int) -> tuple[Tensor, Tensor]:
    module = nn.Sequential(nn.Linear(3, 3))
    ddp = DistributedDataParallel(module)
    module.append(nn.Linear(3, 1))
    ddp(batch(rank)).sum().backward()
    return module[0].weight.grad, module[1].weight.grad


def test_a_parameter_added_after_wrapping_is_not_averaged() -> None:
    """claims#sec-claims-slips-read"""
    first, second = on_ranks(added_after_wrapping)
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])


# Data


def test_the_sampler_gives_equal_numbers() -> None:
    """claims#sec-claims-work, 03-sharding#sec-sharding-uneven: it repeats the start, or drops."""
    shards = [list(DistributedSampler(range(10), 4, rank, shuffle=False)) for rank in range(4)]
    assert shards == [[0, 4, 8], [1, 5, 9], [2, 6, 0], [3, 7, 1]]
    short = [list(DistributedSampler(range(10), 4, rank, drop_last=True)) for rank in range(4)]
    assert [len(shard) for shard in short] == [2] * 4


def test_without_set_epoch_each_epoch_has_the_same_order() -> None:
    """03-sharding"""
    sampler = DistributedSampler(range(100), 2, 0)
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first


def test_an_unseeded_generator_has_one_seed_everywhere() -> None:
    """data: workers that draw from it draw alike on every rank."""
    assert torch.Generator().initial_seed() == torch.Generator().initial_seed()


# The parameter without a gradient


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(3, 1)
        self.unused = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def lacking(rank: int) -> tuple[Tensor, str]:
    ddp = DistributedDataParallel(Two())
    ddp(batch(rank)).sum().backward()
    try:
        ddp(batch(rank))
    except RuntimeError as error:
        return ddp.module.used.weight.grad, str(error)
    return ddp.module.used.weight.grad, ""


def test_the_first_backward_without_a_gradient_passes() -> None:
    """claims#sec-claims-hang, 07-buckets#sec-buckets-unused: only the next forward raises."""
    first, second = on_ranks(lacking)
    assert not torch.equal(first[0], second[0]), "left unsynchronised, silently"
    for _, message in (first, second):
        assert "Expected to have finished reduction in the prior iteration" in message


# Accumulation


def sent(rank: int, around: str) -> tuple[int, Tensor]:
    """Messages of two micro-batches, and the gradient."""
    ddp = DistributedDataParallel(nn.Linear(3, 1))
    messages: list[int] = []

    def count(state, bucket):
        messages.append(bucket.index())
        return allreduce_hook(state, bucket)

    ddp.register_comm_hook(None, count)
    if around == "backward":
        loss = ddp(batch(rank)).sum()
        with ddp.no_sync():
            loss.backward()
    else:
        with ddp.no_sync():
            loss = ddp(batch(rank)).sum()
        loss.backward()
    local = ddp.module.weight.grad.clone()
    ddp(batch(rank)).sum().backward()
    gradients = all_gather(ddp.module.weight.grad)
    assert torch.equal(*gradients)
    assert (len(messages) == 1) == (not torch.equal(*all_gather(local)))
    return len(messages), ddp.module.weight.grad


def test_forward_decides_whether_backward_sends() -> None:
    """claims#sec-claims-no-sync, 08-accumulation#sec-accumulation-forward"""
    for messages, gradient in on_ranks(lambda rank: sent(rank, "backward")):
        assert messages == 2, "no_sync around backward saves nothing"
        assert torch.equal(gradient, torch.full((1, 3), 6.0))
    for messages, gradient in on_ranks(lambda rank: sent(rank, "forward")):
        assert messages == 1
        assert torch.equal(gradient, torch.full((1, 3), 6.0))


# Speed


def defaults(rank: int) -> dict[str, int]:
    ddp = DistributedDataParallel(nn.Linear(3, 1))
    return {
        "bucket": ddp.bucket_bytes_cap,
        "first": dist._DEFAULT_FIRST_BUCKET_BYTES,  # type: ignore[attr-defined]
        "start": ddp.broadcast_bucket_size,
    }


def test_the_default_sizes() -> None:
    """claims#sec-claims-buckets; 04-replicas: tensors travel together until 250 MiB"""
    sizes = {"bucket": 25 * 2**20, "first": 2**20, "start": 250 * 2**20}
    assert on_ranks(defaults, 1) == [sizes]


def views(rank: int) -> list[bool]:
    """Whether both gradients lie in one memory."""
    found = []
    for as_view in (False, True):
        ddp = DistributedDataParallel(nn.Linear(3, 1), gradient_as_bucket_view=as_view)
        ddp(batch(rank)).sum().backward()
        storages = {p.grad.untyped_storage().data_ptr() for p in ddp.parameters()}
        found.append(len(storages) == 1)
    return found


def test_gradients_as_views_lie_in_the_bucket() -> None:
    """claims#sec-claims-four, 07-buckets#sec-buckets-views"""
    assert on_ranks(views, 1) == [[False, True]]


def test_powersgd_begins_with_plain_steps() -> None:
    """07-buckets#sec-buckets-hooks: 1,000 of them."""
    assert PowerSGDState(None).start_powerSGD_iter == 1000


def test_the_schedule_records_one_cycle() -> None:
    """claims#sec-claims-schedule, profiler#sec-profile-schedule"""
    recording = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)

    def recorded(repeat: int) -> list[int]:
        action = schedule(skip_first=5, wait=1, warmup=2, active=5, repeat=repeat)
        return [step for step in range(40) if action(step) in recording]

    assert recorded(1) == list(range(8, 13))
    assert recorded(2) == [*range(8, 13), *range(16, 21)]
    assert recorded(0)[:11] == [*range(8, 13), *range(16, 21), 24]


# Launching and failing


def test_an_address_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """claims#sec-claims-address"""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ValueError, match="environment variable MASTER_ADDR expected"):
        dist.init_process_group("gloo", rank=0, world_size=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="speaks of a machine without a GPU")
def test_nccl_needs_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """claims#sec-claims-nccl"""
    message = "no GPUs found" if dist.is_nccl_available() else "doesn't have NCCL built in"
    with pytest.raises((RuntimeError, ValueError), match=message):
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)


def test_how_long_a_collective_may_take() -> None:
    """02-ranks, 13-machines#sec-machines-timeouts: 30 minutes, or 10 with NCCL."""
    constants = torch.distributed.constants
    assert constants.default_pg_timeout == timedelta(minutes=30)
    if dist.is_nccl_available():
        assert constants.default_pg_nccl_timeout == timedelta(minutes=10)


def other_order(rank: int) -> list[float]:
    ones, tens = torch.ones(2), torch.full((2,), 10.0)
    for tensor in (tens, ones) if rank == 1 else (ones, tens):
        dist.all_reduce(tensor)
    return [ones[0].item(), tens[0].item()]


def test_another_order_of_calls_gives_wrong_sums() -> None:
    """claims#sec-claims-order, 13-machines"""
    assert on_ranks(other_order, 3) == [[12, 21], [21, 12], [12, 21]]


def roll_call(rank: int) -> str:
    """Rank 1 stays away until rank 0 has called."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["called"])
        return ""
    with pytest.raises(RuntimeError) as caught:
        dist.monitored_barrier(timeout=timedelta(seconds=2))
    store.set("called", "")
    return str(caught.value)


def test_monitored_barrier_names_who_is_late() -> None:
    """claims#sec-claims-nccl-async, 13-machines#sec-machines-debug"""
    assert "Rank 1 failed to pass monitoredBarrier" in on_ranks(roll_call)[0]


def test_names_that_torch_has_and_has_not() -> None:
    """claims#sec-claims-slips-run; 05-ring#sec-ring-pytorch"""
    assert not hasattr(dist, "get_process_group")
    assert hasattr(dist.group, "WORLD")
    for name in ("reduce_scatter_single", "reduce_scatter_tensor"):
        assert hasattr(dist, name), name


def test_a_module_needs_its_super_init() -> None:
    """claims#sec-claims-slips-run"""

    class Forgetful(nn.Module):
        def __init__(self) -> None:
            self.line = nn.Linear(1, 1)

    with pytest.raises(AttributeError, match=r"before Module\.__init__"):
        Forgetful()


def mesh_of_one_row(rank: int) -> str:
    with pytest.raises(RuntimeError) as caught:
        DeviceMesh("cpu", [[0, 1]]).get_group()
    return str(caught.value)


def test_a_mesh_of_one_row_has_no_single_group() -> None:
    """claims#sec-claims-slips-read, launching#sec-launching-mesh"""
    for message in on_ranks(mesh_of_one_row):
        assert "`mesh_dim` needs to be specified when device_mesh.ndim > 1" in message


# Memory


def norm_of_shards(rank: int) -> tuple[str, float]:
    module = nn.Linear(4, 2, bias=False)
    fully_shard(module)
    module(torch.ones(1, 4)).sum().backward()
    norm = clip_grad_norm_(module.parameters(), 100)
    return type(norm).__name__, norm.full_tensor().item()


def test_the_norm_under_fully_shard_is_sharded() -> None:
    """15-after: `.full_tensor()` before you print it."""
    for kind, norm in on_ranks(norm_of_shards):
        assert kind == "DTensor"
        assert norm == pytest.approx(8**0.5)
