"""DistributedDataParallel against one process on the joined batch, and beside torch's own."""

import copy
import inspect
import time
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import miniddp
from miniddp import hooks
from miniddp.bucket import Bucket
from miniddp.ddp import checks
from miniddp.launch import RanksFailed
from miniddp.process import device

from ..parity import row
from . import ddp_cases
from .ddp_cases import BOTH, Mlp, TwoPaths
from .ranks import run


def wrapper(implementation: str) -> Callable[..., nn.Module]:
    if implementation == "torch":
        return nn.parallel.DistributedDataParallel
    if implementation == "views":
        return with_views
    return miniddp.DistributedDataParallel


def with_views(module: nn.Module, **options: Any) -> nn.Module:
    options = {"gradient_as_bucket_view": True, **options}
    return miniddp.DistributedDataParallel(module, **options)


def run_case(rank: int, implementation: str, *names: str) -> None:
    warnings.simplefilter("ignore")
    for name in names:
        torch.manual_seed(rank)
        getattr(ddp_cases, name)(wrapper(implementation), rank, dist.get_world_size())


@pytest.mark.parametrize("implementation", ["miniddp", "torch"])
@pytest.mark.parametrize("case", [pytest.param(case.__name__, marks=case.parity) for case in BOTH])
def test_like_torch(case: str, implementation: str) -> None:
    world_size = 4 if case == "sub_group" else 2
    run(run_case, world_size, implementation, case, timeout=30)


@pytest.mark.parametrize(
    ("world_size", "implementation"),
    [(1, "miniddp"), (3, "miniddp"), (4, "miniddp"), (2, "views"), (3, "views")],
)
def test_all_cases(world_size: int, implementation: str) -> None:
    names = [case.__name__ for case in BOTH if case.__name__ != "compiled_module"]
    run(run_case, world_size, implementation, *names, timeout=120)


def test_without_a_process_group() -> None:
    with pytest.raises(RuntimeError, match="there is no process group"):
        miniddp.DistributedDataParallel(Mlp())


def fails_on_every_rank(world_size: int, fn: Callable[..., Any], *args: Any) -> list[str]:
    """The messages with which `fn` fails on the ranks; all of them must fail."""
    messages = run(message_of, world_size, fn, *args)
    assert all(messages), messages
    return list(messages)


def message_of(rank: int, fn: Callable[..., Any], *args: Any) -> str:
    try:
        fn(rank, *args)
    except (RuntimeError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def leave_out_a_branch(rank: int, only_on_rank: int | None) -> None:
    ddp = miniddp.DistributedDataParallel(TwoPaths(), bucket_cap_mb=0.0001, check_reduction=True)
    x = torch.randn(3, 5)
    (ddp(x, True).sum() + ddp(x, False).sum()).backward()  # so that buckets are rebuilt
    loss = ddp(x, True).sum()
    if only_on_rank not in (None, rank):
        loss = loss + ddp(x, False).sum()
    loss.backward()


@pytest.mark.parametrize("only_on_rank", [None, 0, 1])
def test_check_reduction_names_a_missing_gradient_on_every_rank(only_on_rank: int | None) -> None:
    for message in fails_on_every_rank(2, leave_out_a_branch, only_on_rank):
        assert "'right.weight'" in message
        assert "'right.bias'" in message
        assert "'left.weight'" not in message
        count = 2 if only_on_rank is None else 1
        assert f"on {count} of 2 ranks" in message
        assert "find_unused_parameters=True" in message


def leave_out_a_branch_unchecked(rank: int) -> None:
    ddp = miniddp.DistributedDataParallel(TwoPaths())
    for _ in range(2):
        ddp(torch.randn(3, 5), True).sum().backward()


def test_the_next_forward_names_a_missing_gradient() -> None:
    for rank, message in enumerate(fails_on_every_rank(2, leave_out_a_branch_unchecked)):
        assert message.startswith(
            "RuntimeError: Expected to have finished reduction in the prior iteration before "
            "starting a new one: parameters which did not receive grad for rank "
            f"{rank}: right.weight, right.bias."
        )


@dataclass
class Two:
    first: torch.Tensor
    second: torch.Tensor


class OfNoKnownKind:
    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        self.first, self.second = first, second


def leave_out_an_output(rank: int, kind: type) -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(5, 3) for _ in range(2))

        def forward(self, x: torch.Tensor) -> Any:
            first, second = (head(x) for head in self.heads)
            return kind([first, second]) if kind is list else kind(first, second)

    def outputs() -> tuple[torch.Tensor, torch.Tensor]:
        output = ddp(torch.randn(3, 5))
        return output if kind is list else (output.first, output.second)

    ddp = miniddp.DistributedDataParallel(TwoHeads(), check_reduction=True)
    first, second = outputs()
    (first.sum() + second.sum()).backward()
    ddp_cases.assert_equal_on_all_ranks(ddp)
    first, _ = outputs()
    first.sum().backward()


@pytest.mark.parametrize("kind", [list, Two, OfNoKnownKind])
def test_check_reduction_names_what_an_unused_output_left_out(kind: type) -> None:
    for message in fails_on_every_rank(2, leave_out_an_output, kind):
        assert "'heads.1.weight' (on 2 of 2 ranks)" in message
        assert "heads.0" not in message


def leave_out_everything(rank: int) -> None:
    """Rank 0 has an output that no parameter had a part in."""

    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if rank == 0 else self.layer(x)

    ddp = miniddp.DistributedDataParallel(Skip(), check_reduction=True)
    ddp(torch.randn(3, 5, requires_grad=True)).sum().backward()


def test_check_reduction_on_a_rank_without_any_gradient() -> None:
    for message in fails_on_every_rank(2, leave_out_everything):
        assert "'layer.weight' (on 1 of 2 ranks)" in message


def goes_on_after_a_hook_failed(rank: int) -> None:
    ddp = miniddp.DistributedDataParallel(ddp_cases.seeded(Mlp, rank))
    failing = True

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if not failing:
            return hooks.allreduce_hook(None, bucket)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_exception(OSError("the network is gone"))
        return future

    ddp.register_comm_hook(None, hook)
    with pytest.raises(OSError, match="the network is gone"):
        ddp(torch.randn(2, 5)).sum().backward()
    failing = False
    ddp.zero_grad()
    ddp(torch.randn(2, 5)).sum().backward()
    ddp_cases.assert_equal_on_all_ranks(ddp)


def test_goes_on_after_a_hook_failed() -> None:
    run(goes_on_after_a_hook_failed, 2)


def check_reduction_lets_pass(rank: int) -> None:
    """What is no missing gradient: no gradient at all, a frozen pass, `no_sync`."""
    ddp = miniddp.DistributedDataParallel(ddp_cases.seeded(Mlp, rank), check_reduction=True)
    x = torch.randn(2, 5, requires_grad=True)
    torch.autograd.grad(ddp(x).sum(), x)
    with ddp.no_sync():
        ddp(x).sum().backward()
    ddp.requires_grad_(False)
    ddp(x).sum().backward()
    ddp.requires_grad_(True)
    for _ in range(2):
        ddp(x).sum().backward()
    ddp_cases.assert_equal_on_all_ranks(ddp)


def test_check_reduction_lets_pass() -> None:
    run(check_reduction_lets_pass, 2)


def backward_twice(rank: int) -> None:
    ddp = miniddp.DistributedDataParallel(Mlp(), check_reduction=True)
    loss = ddp(torch.randn(2, 5)).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def backward_twice_through_a_dataclass(rank: int) -> None:
    class Linear(nn.Linear):
        def forward(self, x: torch.Tensor) -> Two:
            return Two(super().forward(x), x)

    ddp = miniddp.DistributedDataParallel(Linear(5, 3), check_reduction=True)
    loss = ddp(torch.randn(2, 5)).first.sum()
    loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.parametrize("fn", [backward_twice, backward_twice_through_a_dataclass])
def test_a_second_backward_through_one_forward(fn: Any) -> None:
    for message in fails_on_every_rank(2, fn):
        assert "backward ran again" in message
        assert "no_sync" in message


def unused_after_no_sync(rank: int) -> None:
    """What `zero_grad` has thrown away does not count as used."""
    ddp = miniddp.DistributedDataParallel(TwoPaths(), find_unused_parameters=True)
    x = torch.randn(3, 5)
    with ddp.no_sync():
        ddp(x, False).sum().backward()
    ddp.zero_grad()
    ddp(x, True).sum().backward()
    assert ddp.module.right.weight.grad is None
    with ddp.no_sync():
        ddp(x * (rank + 1), False).sum().backward()
    ddp(x, True).sum().backward()
    ddp_cases.assert_equal_on_all_ranks(ddp.module.right)


def test_unused_after_no_sync() -> None:
    run(unused_after_no_sync, 2)


def wrap_while_the_loss_lives(rank: int) -> None:
    """A cell of a notebook that runs twice; hooks go with their wrapper."""
    model = ddp_cases.seeded(Mlp, rank)
    ddp = miniddp.DistributedDataParallel(model)
    for _ in range(2):
        ddp = miniddp.DistributedDataParallel(model)
        loss = ddp(torch.randn(2, 5)).sum()
        loss.backward()
        ddp_cases.assert_equal_on_all_ranks(ddp)
    reducer = weakref.ref(ddp.reducer)
    graph = ddp(torch.randn(2, 5)).sum()
    del ddp
    assert reducer() is None
    model.zero_grad()
    graph.backward()
    ddp_cases.assert_differs_between_ranks(model)
    assert loss.requires_grad


def test_wrap_while_the_loss_lives() -> None:
    run(wrap_while_the_loss_lives, 2)


def launched_from_two_threads(rank: int) -> list[int]:
    """A module on two devices has a thread of backward for each."""
    ddp = miniddp.DistributedDataParallel(Mlp(), bucket_cap_mb=0.0001)
    ddp(torch.randn(2, 5)).sum().backward()
    ddp(torch.randn(2, 5))
    reducer, order = ddp.reducer, []

    def launch(bucket: Bucket) -> torch.futures.Future[Any]:
        time.sleep(0.01)  # time for the other thread to look at the same bucket
        order.append(bucket.index())
        return future_of(bucket.buffer())

    reducer.launch = launch
    reducer.finish = lambda: None
    numbers = range(len(reducer.parameters) - 1)  # the last one would end a backward pass
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(torch.no_grad()(reducer.mark_ready), numbers))
    return order


def test_launched_from_two_threads() -> None:
    for order in run(launched_from_two_threads, 2):
        assert order == sorted(set(order))


def record_inputs(rank: int) -> list[str]:
    class Record(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, x: torch.Tensor, **others: Any) -> list[str]:
            return [x.device.type, others["nested"][0]["y"].device.type, others["text"]]

    ddp = miniddp.DistributedDataParallel(Record())
    ddp.device_ids = [torch.device("meta")]
    with torch.no_grad():
        return ddp(torch.ones(1), nested=[{"y": torch.ones(2)}], text="left alone")


def test_inputs_go_to_the_device_of_the_module() -> None:
    assert run(record_inputs, 1)[0] == ["meta", "meta", "left alone"]


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


def refused(rank: int, options: dict[str, Any]) -> None:
    miniddp.DistributedDataParallel(Mlp(), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_ids": [0]}, "ValueError: device_ids and output_device must name the one GPU"),
        ({"output_device": 0}, "ValueError: device_ids and output_device must name the one GPU"),
        ({"device_ids": [0, 1]}, "ValueError: device_ids can only be None or contain a single"),
        *(
            ({name: True}, f"NotImplementedError: miniddp's DistributedDataParallel has no {name}")
            for name in checks.NOT_HERE.split()
        ),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], message: str) -> None:
    (seen,) = run(message_of, 1, refused, options, backend="gloo", default_device=False)
    assert seen.startswith(message)


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
        assert message == "TypeError: Communication hook must be callable."


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
        (None, "callback must return a torch.futures.Future object, but got Bucket"),
        ("text", "must hold a tensor of 419 elements, but got 'text'"),
        (torch.ones(1), "must hold a tensor of 419 elements, but got tensor([1.])"),
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
        here = f"on {device()}"
        assert f"is torch.float64 {here}, but was torch.float32 {here} when" in message


def frozen_on_one_rank(rank: int) -> None:
    miniddp.DistributedDataParallel(Mlp().requires_grad_(rank == 0))


def test_a_module_that_is_frozen_on_one_rank() -> None:
    for message in fails_on_every_rank(2, frozen_on_one_rank):
        assert f"'first.weight' ((16, 5) torch.float32 {device().type}) on rank 1" in message


def options_that_differ(rank: int, name: str, values: list[Any]) -> None:
    miniddp.DistributedDataParallel(Mlp(), **{name: values[rank]})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("bucket_cap_mb", [None, 1]),
        ("find_unused_parameters", [True, False]),
        ("check_reduction", [False, True]),
        ("forward_sync_buffers", [False, True]),
    ],
)
def test_options_that_the_ranks_must_share(name: str, values: list[Any]) -> None:
    for message in fails_on_every_rank(2, options_that_differ, name, values):
        assert f"{name}={values[0]} on rank 0, {name}={values[1]} on rank 1" in message
        assert "wrap it with the same options" in message


def options_of_one_rank(rank: int) -> None:
    ddp = miniddp.DistributedDataParallel(Mlp(), gradient_as_bucket_view=rank == 0)
    ddp(torch.randn(2, 5)).sum().backward()
    ddp_cases.assert_equal_on_all_ranks(ddp.module)


def test_an_option_that_a_rank_may_have_alone() -> None:
    run(options_of_one_rank, 2)


def another_default_device(rank: int) -> None:
    ddp = miniddp.DistributedDataParallel(Mlp())
    inputs = torch.randn(2, 2, 5)
    with torch.device("meta"):
        for x in inputs:
            ddp(x).sum().backward()


def test_under_another_default_device() -> None:
    run(another_default_device, 2)


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
    with pytest.raises(RuntimeError, match="finished reduction in the prior iteration"):
        ddp(x)
    ddp(x.chunk(2)[rank]).square().mean().backward()
    single(x).square().mean().backward()
    ddp_cases.assert_same(ddp.module, single, "after the error")


def test_goes_on_after_an_error_inside_backward() -> None:
    run(goes_on_after_an_error_inside_backward, 2)


def goes_on_after_an_error(rank: int) -> None:
    """A caught error leaves a wrapper that works."""
    ddp = miniddp.DistributedDataParallel(ddp_cases.seeded(TwoPaths, rank))
    x = torch.randn(3, 5)
    ddp(x, True).sum().backward()
    with pytest.raises(RuntimeError, match="finished reduction in the prior iteration"):
        ddp(x, True)
    ddp.zero_grad()
    (ddp(x, True).sum() + ddp(x, False).sum()).backward()
    ddp_cases.assert_equal_on_all_ranks(ddp)


def test_goes_on_after_an_error() -> None:
    run(goes_on_after_an_error, 2)


def buckets_of_each_step(rank: int, implementation: str, **options: Any) -> list[list[Any]]:
    """Shapes in each bucket that a hook sees, step by step."""
    seen: list[list[Any]] = []

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen[-1].append([tuple(gradient.shape) for gradient in bucket.gradients()])
        return future_of(bucket.buffer())

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(60, 60) for _ in range(6)), nn.Linear(60, 3))
    ddp = wrapper(implementation)(model, **options)
    ddp.register_comm_hook(None, hook)
    for _ in range(3):
        seen.append([])
        ddp(torch.randn(2, 60)).sum().backward()
    return seen


@row(
    "averaging",
    "exact",
    says="Which gradients share a bucket, and in which order: in the first step and after it, for "
    "the default, for small, fractional and large `bucket_cap_mb`, with unused parameters.",
)
@pytest.mark.parametrize("cap", [None, 0, 0.02, 0.03, 25])
@pytest.mark.parametrize("find_unused", [False, True])
def test_the_same_buckets_as_torch(cap: float | None, find_unused: bool) -> None:
    options = {"bucket_cap_mb": cap, "find_unused_parameters": find_unused}
    ours, theirs = (
        run(partial(buckets_of_each_step, **options), 2, implementation)
        for implementation in ("miniddp", "torch")
    )
    assert list(ours) == list(theirs)
    if cap == 0.02 and not find_unused:
        assert [len(step) for step in ours[0]] == [1, 3, 3]


def rebuilt_order(rank: int) -> list[str]:
    """Names in the order of the buckets; on each rank another branch comes last."""
    ddp = miniddp.DistributedDataParallel(ddp_cases.Crossed(), bucket_cap_mb=0.0001)
    for _ in range(2):
        ddp(torch.randn(2, 5), rank == 0).sum().backward()
    return [ddp.reducer.names[i] for bucket in ddp.reducer.buckets for i in bucket.indices]


def test_buckets_are_rebuilt_in_the_order_of_rank_0() -> None:
    order, of_rank_1 = run(rebuilt_order, 2)
    assert order == of_rank_1
    assert order[0].startswith("large.1"), "on rank 0 the large branch comes last"


def test_the_signature_is_torchs() -> None:
    ours, theirs = (
        [(each.name, each.default) for each in inspect.signature(kind).parameters.values()]
        for kind in (miniddp.DistributedDataParallel, nn.parallel.DistributedDataParallel)
    )
    assert ours == theirs


def die_in_backward(rank: int) -> None:
    ddp = miniddp.DistributedDataParallel(Mlp())
    loss = ddp(torch.randn(2, 5)).sum()
    if rank == 1:
        raise OSError("the disk is gone")
    loss.backward()


def test_a_rank_that_dies_is_named() -> None:
    with pytest.raises(RanksFailed, match="the disk is gone") as failure:
        run(die_in_backward, 2, timeout=30)
    assert "OSError" in failure.value.tracebacks[1]
