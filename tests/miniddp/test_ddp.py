"""DistributedDataParallel against one process on the joined batch, and beside torch's own."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import miniddp
from miniddp.launch import RanksFailed, run_ranks

from . import ddp_cases
from .ddp_cases import BOTH, Mlp, TwoPaths


def wrapper(implementation: str) -> Callable[..., nn.Module]:
    if implementation == "torch":
        return nn.parallel.DistributedDataParallel
    return miniddp.DistributedDataParallel


def run_case(rank: int, implementation: str, *names: str) -> None:
    warnings.simplefilter("ignore")
    for name in names:
        torch.manual_seed(rank)
        getattr(ddp_cases, name)(wrapper(implementation), rank, dist.get_world_size())


@pytest.mark.parametrize("implementation", ["miniddp", "torch"])
@pytest.mark.parametrize("case", [pytest.param(case.__name__, marks=case.parity) for case in BOTH])
def test_like_torch(case: str, implementation: str) -> None:
    world_size = 4 if case == "sub_group" else 2
    run_ranks(run_case, world_size, implementation, case, timeout=30)


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_all_cases(world_size: int) -> None:
    names = [case.__name__ for case in BOTH if case.__name__ != "compiled_module"]
    run_ranks(run_case, world_size, "miniddp", *names, timeout=120)


def test_without_a_process_group() -> None:
    with pytest.raises(RuntimeError, match="there is no process group"):
        miniddp.DistributedDataParallel(Mlp())


def fails_on_every_rank(world_size: int, fn: Callable[..., Any], *args: Any) -> list[str]:
    """The messages with which `fn` fails on the ranks; all of them must fail."""
    messages = run_ranks(message_of, world_size, fn, *args)
    assert all(messages), messages
    return list(messages)


def message_of(rank: int, fn: Callable[..., Any], *args: Any) -> str:
    try:
        fn(rank, *args)
    except (RuntimeError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def leave_out_a_branch(rank: int, only_on_rank: int | None) -> None:
    ddp = miniddp.DistributedDataParallel(TwoPaths(), bucket_cap_mb=0.0001, first_bucket_mb=0.0001)
    everything = rank != only_on_rank and only_on_rank is not None
    x = torch.randn(3, 5)
    loss = ddp(x, True).sum()
    if everything:
        loss = loss + ddp(x, False).sum()
    loss.backward()


@pytest.mark.parametrize("only_on_rank", [None, 0, 1])
def test_a_parameter_without_gradient_is_named_on_every_rank(only_on_rank: int | None) -> None:
    for message in fails_on_every_rank(2, leave_out_a_branch, only_on_rank):
        assert "'right.weight'" in message
        assert "'right.bias'" in message
        assert "'left.weight'" not in message
        count = 2 if only_on_rank is None else 1
        assert f"on {count} of 2 ranks" in message
        assert "find_unused_parameters=True" in message


def wrap_twice(rank: int) -> None:
    model = Mlp()
    first = miniddp.DistributedDataParallel(model)
    miniddp.DistributedDataParallel(nn.Sequential(model))
    del first


def test_wrapping_a_module_again() -> None:
    for message in fails_on_every_rank(2, wrap_twice):
        assert message.startswith("ValueError: parameter '0.first.weight' belongs to another")


def backward_twice(rank: int) -> None:
    ddp = miniddp.DistributedDataParallel(Mlp())
    loss = ddp(torch.randn(2, 5)).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def test_a_second_backward_through_one_forward() -> None:
    for message in fails_on_every_rank(2, backward_twice):
        assert "backward ran again" in message
        assert "no_sync" in message


def two_forwards_then_two_backwards(rank: int) -> None:
    ddp = miniddp.DistributedDataParallel(ddp_cases.seeded(Mlp, rank))
    single = ddp_cases.reference(Mlp)
    batches = [ddp_cases.joined(step, 2)[0] for step in range(2)]
    losses = [ddp(x.chunk(2)[rank]).square().mean() for x in batches]
    for loss, x in zip(losses, batches, strict=True):
        loss.backward()
        single(x).square().mean().backward()
        ddp_cases.assert_same(ddp.module, single, "accumulated")


def test_two_forwards_then_two_backwards() -> None:
    """torch's DDP leaves the second backward unsynchronised without a word."""
    run_ranks(two_forwards_then_two_backwards, 2)


def sparse_gradient(rank: int) -> None:
    ddp = miniddp.DistributedDataParallel(nn.Embedding(5, 3, sparse=True))
    ddp(torch.tensor([1, 2])).sum().backward()


def test_a_sparse_gradient() -> None:
    for message in fails_on_every_rank(2, sparse_gradient):
        assert "gradient of 'weight' is sparse" in message


def wrong_device(rank: int) -> None:
    miniddp.DistributedDataParallel(nn.Linear(2, 2, device="meta"))


def test_a_device_that_the_group_cannot_reach() -> None:
    for message in fails_on_every_rank(2, wrong_device):
        assert "parameter 'weight' is on meta" in message


def wrong_device_ids(rank: int) -> None:
    miniddp.DistributedDataParallel(Mlp(), device_ids=[0])


def test_device_ids_of_another_device() -> None:
    for message in fails_on_every_rank(2, wrong_device_ids):
        assert "device_ids is [0]" in message


def create_graph(rank: int) -> None:
    ddp = miniddp.DistributedDataParallel(Mlp())
    ddp(torch.randn(2, 5)).sum().backward(create_graph=True)


def test_create_graph() -> None:
    for message in fails_on_every_rank(2, create_graph):
        assert "create_graph=True" in message


def hook_that_is_none(rank: int) -> None:
    miniddp.DistributedDataParallel(Mlp()).register_comm_hook(None, None)


def test_a_hook_that_cannot_be_called() -> None:
    for message in fails_on_every_rank(2, hook_that_is_none):
        assert message == "TypeError: hook must be callable, not NoneType"


def hook_with_result(rank: int, result: Any) -> None:
    ddp = miniddp.DistributedDataParallel(Mlp())
    ddp.register_comm_hook(
        None, lambda state, bucket: future_of(result) if result is not None else bucket
    )
    ddp(torch.randn(2, 5)).sum().backward()


def future_of(value: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "must return a torch.futures.Future of the averaged buffer, not Bucket"),
        ("text", "must hold a tensor of the bucket's 419 elements, not str"),
        (torch.ones(1), "must hold a tensor of the bucket's 419 elements, not 1 elements"),
    ],
)
def test_a_hook_that_returns_something_else(result: Any, message: str) -> None:
    for seen in fails_on_every_rank(2, hook_with_result, result):
        assert message in seen


def two_hooks(rank: int) -> None:
    ddp = miniddp.DistributedDataParallel(Mlp())
    for _ in range(2):
        ddp.register_comm_hook(None, lambda state, bucket: future_of(bucket.buffer()))


def test_a_second_hook() -> None:
    for message in fails_on_every_rank(2, two_hooks):
        assert "can only be called once" in message


def converted_after_wrapping(rank: int) -> None:
    ddp = miniddp.DistributedDataParallel(Mlp()).double()
    ddp(torch.randn(2, 5).double()).sum().backward()


def test_converting_the_module_after_wrapping() -> None:
    for message in fails_on_every_rank(2, converted_after_wrapping):
        assert "is torch.float64 on cpu, but its bucket is torch.float32 on cpu" in message


def frozen_on_one_rank(rank: int) -> None:
    miniddp.DistributedDataParallel(Mlp().requires_grad_(rank == 0))


def test_a_module_that_is_frozen_on_one_rank() -> None:
    for message in fails_on_every_rank(2, frozen_on_one_rank):
        assert "'first.weight' with requires_grad=False on rank 1" in message


def copy_of_a_sub_group(rank: int) -> None:
    group = dist.new_group([0, 1])
    copy.deepcopy(miniddp.DistributedDataParallel(Mlp(), process_group=group))


def test_copying_the_wrapper_of_a_sub_group() -> None:
    for message in fails_on_every_rank(2, copy_of_a_sub_group):
        assert "copy its module and wrap the copy" in message


def goes_on_after_an_error_inside_backward(rank: int) -> None:
    """What is still being sent when backward fails does not reach the next pass's buckets."""
    ddp = miniddp.DistributedDataParallel(ddp_cases.seeded(Mlp, rank), bucket_cap_mb=0.0005)
    single = ddp_cases.reference(Mlp)
    x, _ = ddp_cases.joined(0, 2)
    failing = True

    def fail(_: torch.Tensor) -> None:
        if failing:
            raise KeyError("mine")

    ddp.module.first.bias.register_hook(fail)
    with pytest.raises(KeyError, match="mine"):
        ddp(torch.randn(2, 5)).sum().backward()
    failing = False
    ddp.zero_grad()
    ddp(x.chunk(2)[rank]).square().mean().backward()
    single(x).square().mean().backward()
    ddp_cases.assert_same(ddp.module, single, "after the error")


def test_goes_on_after_an_error_inside_backward() -> None:
    run_ranks(goes_on_after_an_error_inside_backward, 2)


def goes_on_after_an_error(rank: int) -> None:
    """A caught error leaves a wrapper that works."""
    ddp = miniddp.DistributedDataParallel(ddp_cases.seeded(TwoPaths, rank))
    x = torch.randn(3, 5)
    with pytest.raises(RuntimeError, match="no gradient"):
        ddp(x, True).sum().backward()
    ddp.zero_grad()
    (ddp(x, True).sum() + ddp(x, False).sum()).backward()
    ddp_cases.assert_equal_on_all_ranks(ddp)


def test_goes_on_after_an_error() -> None:
    run_ranks(goes_on_after_an_error, 2)


def names_by_bucket(rank: int) -> list[list[list[str]]]:
    """The parameters of each bucket before and after the first backward pass."""
    ddp = miniddp.DistributedDataParallel(
        ddp_cases.Crossed(), bucket_cap_mb=0.0001, first_bucket_mb=0.00001
    )
    plans = []
    for _ in range(2):
        ddp(torch.randn(2, 5), rank == 0).sum().backward()
        plans.append([[ddp.reducer.names[i] for i in b.indices] for b in ddp.reducer.buckets])
    return plans


def test_buckets_go_from_the_last_layer_to_the_first_and_then_in_ready_order() -> None:
    (first, rebuilt), of_rank_1 = run_ranks(names_by_bucket, 2)
    assert [first, rebuilt] == of_rank_1, "all ranks have the same plan"
    flat = [name for bucket in first for name in bucket]
    layers = ["large.1", "large.0", "small"]
    assert flat == [f"{layer}.{kind}" for layer in layers for kind in ("bias", "weight")]
    assert first[0] == ["large.1.bias"], "the first bucket is small"
    rebuilt_names = [name for bucket in rebuilt for name in bucket]
    assert sorted(rebuilt_names) == sorted(flat)
    assert rebuilt_names[0].startswith("large.1"), "on rank 0 the large branch comes last"


def die_in_backward(rank: int) -> None:
    ddp = miniddp.DistributedDataParallel(Mlp())
    loss = ddp(torch.randn(2, 5)).sum()
    if rank == 1:
        raise OSError("the disk is gone")
    loss.backward()


def test_a_rank_that_dies_is_named() -> None:
    with pytest.raises(RanksFailed, match="the disk is gone") as failure:
        run_ranks(die_in_backward, 2, timeout=30)
    assert "OSError" in failure.value.tracebacks[1]
