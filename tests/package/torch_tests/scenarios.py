"""Scenarios of PyTorch's tests, told anew for a module on the CPU.

They stand for tests that the wheel does not ship (`test_c10d_common.py`, `test_c10d_gloo.py`) and
for tests that mix in what only torch has. Each gets `wrap`, which is miniddp's class or torch's.
"""

import copy
import functools
import gc
import io
import itertools
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import miniddp.bucket
import miniddp.hooks

BATCH = 4
VIEWS = (False, True)


def of_torch(wrap: Any) -> bool:
    return wrap is nn.parallel.DistributedDataParallel


def equal(actual: Tensor | None, expected: Tensor | None) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def same_gradients(ddp: nn.Module, single: nn.Module) -> None:
    for mine, expected in zip(ddp.parameters(), single.parameters(), strict=True):
        equal(mine.grad, expected.grad)


def joined(world_size: int, step: int, *sizes: int) -> list[Tensor]:
    """Random tensors with as many rows as all ranks' parts together, the same on every rank."""
    torch.manual_seed(100 + step)
    return [torch.randn(BATCH * world_size, size) for size in sizes]


def part(tensor: Tensor, rank: int) -> Tensor:
    return tensor[rank * BATCH : (rank + 1) * BATCH]


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(31415)
    return build()


def follows_one_process(
    wrap: Any,
    rank: int,
    world_size: int,
    build: Callable[[], nn.Module],
    call: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: model(x),
    steps: int = 3,
    **options: Any,
) -> nn.Module:
    """Train on a part each and on all parts in one process: gradients and weights are equal."""
    single = seeded(build)
    ddp = wrap(copy.deepcopy(single), **options)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (single, ddp)]
    for step in range(steps):
        x, target = joined(world_size, step, 20, 20)
        x.requires_grad_()
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.mse_loss(call(single, x), target).backward()
        F.mse_loss(call(ddp, part(x, rank)), part(target, rank)).backward()
        same_gradients(ddp, single)
        for optimizer in optimizers:
            optimizer.step()
    return ddp


class Layers(nn.Module):
    """Two layers, of which `forward` checkpoints those that are named, in their order."""

    def __init__(self, *names: str, use_reentrant: bool, tied: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(20, 20), nn.Linear(20, 20)
        self.names, self.use_reentrant = names, use_reentrant
        if tied:
            self.first.weight = self.second.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for name in self.names:
            x = checkpoint(getattr(self, name), x, use_reentrant=self.use_reentrant)
        return x


class Alternating(nn.Module):
    """Uses, and checkpoints, the second layer in odd passes and the first in even ones."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(20, 20), nn.Linear(20, 20)
        self.passes = 0
        if tied:
            self.first.weight = self.second.weight

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        layer = self.second if self.passes % 2 else self.first
        return checkpoint(layer, x, use_reentrant=False)


def follows_with_checkpoints(
    wrap: Any,
    rank: int,
    world_size: int,
    *names: str,
    refuses_reentrant: bool = False,
    **options: Any,
) -> None:
    """With both kinds of checkpoint around these layers, in views of the buckets and not."""
    for view, reentrant in itertools.product(VIEWS, (True, False)):
        is_refused = refuses_reentrant and reentrant
        with pytest.raises(RuntimeError) if is_refused else nullcontext():
            follows_one_process(
                wrap,
                rank,
                world_size,
                functools.partial(Layers, *names, use_reentrant=reentrant),
                gradient_as_bucket_view=view,
                **options,
            )


def checkpointed_once(wrap: Any, rank: int, world_size: int) -> None:
    follows_with_checkpoints(wrap, rank, world_size, "second")


def checkpointed_with_unused_parameters(wrap: Any, rank: int, world_size: int) -> None:
    """The reentrant kind runs a backward inside a backward: its parameters look unused."""
    options = {"refuses_reentrant": True, "find_unused_parameters": True}
    follows_with_checkpoints(wrap, rank, world_size, "second", **options)


def checkpointed_twice(wrap: Any, rank: int, world_size: int) -> None:
    """With the reentrant kind a parameter's gradient is complete twice: refused."""
    for find_unused in (False, True):
        options = {"refuses_reentrant": True, "find_unused_parameters": find_unused}
        follows_with_checkpoints(wrap, rank, world_size, "second", "second", **options)


def checkpointed_twice_in_a_static_graph(wrap: Any, rank: int, world_size: int) -> None:
    for tied in (False, True):
        follows_one_process(
            wrap,
            rank,
            world_size,
            lambda t=tied: Layers("second", "second", use_reentrant=True, tied=t),
            static_graph=True,
        )


def checkpointed_layers_that_change(wrap: Any, rank: int, world_size: int) -> None:
    for view, tied in itertools.product(VIEWS, (False, True)):
        follows_one_process(
            wrap,
            rank,
            world_size,
            functools.partial(Alternating, tied),
            gradient_as_bucket_view=view,
            find_unused_parameters=True,
        )


def tied_layers() -> nn.Module:
    first, second = nn.Linear(20, 20), nn.Linear(20, 20)
    first.weight = second.weight
    return nn.Sequential(first, second)


def wrapper_checkpointed_with_shared_weights(wrap: Any, rank: int, world_size: int) -> None:
    """The checkpoint is around the wrapper: its forward runs again, inside backward."""
    for view, reentrant in itertools.product(VIEWS, (True, False)):
        follows_one_process(
            wrap,
            rank,
            world_size,
            tied_layers,
            call=functools.partial(checkpoint, use_reentrant=reentrant),
            gradient_as_bucket_view=view,
        )


def cpu_module(wrap: Any, rank: int, world_size: int, view: bool = False) -> None:
    group = dist.group.WORLD
    follows_one_process(
        wrap,
        rank,
        world_size,
        lambda: nn.Sequential(
            nn.Linear(20, 50, bias=False), nn.ReLU(), nn.Linear(50, 20, bias=False)
        ),
        process_group=group,
        bucket_cap_mb=0.001,
        gradient_as_bucket_view=view,
    )


def cpu_module_with_views(wrap: Any, rank: int, world_size: int) -> None:
    cpu_module(wrap, rank, world_size, view=True)


class Task(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.ones(2, 2))

    def forward(self, x: Any) -> Tensor:
        return self.p + x


class Tasks(nn.Module):
    """One task for rank 0, one for the other ranks, one for nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.of_rank_0, self.of_others, self.of_nobody = Task(), Task(), Task()

    def forward(self, x: float, rank: int) -> Tensor:
        return self.of_rank_0(x) if rank == 0 else self.of_others(x)


def used_on_some_ranks(wrap: Any, rank: int, world_size: int, **options: Any) -> None:
    """A gradient of one rank reaches all ranks; what nobody uses keeps `.grad` None."""
    for view in VIEWS:
        ddp = wrap(Tasks(), find_unused_parameters=True, gradient_as_bucket_view=view, **options)
        ddp(8, rank).mean().backward()
        equal(ddp.module.of_rank_0.p.grad, torch.full((2, 2), 0.25 / world_size))
        equal(ddp.module.of_others.p.grad, torch.full((2, 2), 0.25 * (world_size - 1) / world_size))
        assert ddp.module.of_nobody.p.grad is None


def used_on_some_ranks_of_a_static_graph(wrap: Any, rank: int, world_size: int) -> None:
    used_on_some_ranks(wrap, rank, world_size, static_graph=True)


def nothing_unused_on_rank_0(wrap: Any, rank: int, world_size: int) -> None:
    """Rank 0 uses all parameters, the others do not: rank 0 takes part all the same."""

    class OneMoreOnRank0(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Task(), Task()

        def forward(self, x: float) -> Tensor:
            return self.second(self.first(x)) if rank == 0 else self.second(x)

    ddp = wrap(OneMoreOnRank0(), find_unused_parameters=True)
    ddp(8).mean().backward()
    equal(ddp.module.first.p.grad, torch.full((2, 2), 0.25 / world_size))
    equal(ddp.module.second.p.grad, torch.full((2, 2), 0.25))


class Classifier(nn.Module):
    """Three layers, of which the last can be left out; the first can have a dtype of its own."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(2, 10, bias=False, dtype=dtype)
        self.second = nn.Linear(10, 4, bias=False)
        self.third = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor, use_third: bool = True) -> Tensor:
        hidden = self.second(self.first(x).relu().float()).relu()
        return self.third(hidden) if use_third else hidden


def classified(world_size: int, step: int) -> tuple[Tensor, Tensor]:
    x, scores = joined(world_size, step, 2, 4)
    return x, scores.argmax(1)


def ignored_output(wrap: Any, rank: int, world_size: int, use_third: bool = True) -> None:
    """Forward passes without a backward leave nothing behind."""
    single = seeded(Classifier)
    ddp = wrap(copy.deepcopy(single), find_unused_parameters=not use_third)
    x, target = classified(world_size, 0)
    for _ in range(4):
        output = ddp(part(x, rank), use_third)
        del output
    for _ in range(4):
        F.cross_entropy(ddp(part(x, rank), use_third), part(target, rank)).backward()
        F.cross_entropy(single(x, use_third), target).backward()
        same_gradients(ddp, single)


def ignored_output_with_unused_parameters(wrap: Any, rank: int, world_size: int) -> None:
    ignored_output(wrap, rank, world_size, use_third=False)


def mixed_dtypes(wrap: Any, rank: int, world_size: int) -> None:
    single = seeded(lambda: Classifier(torch.float64))
    ddp = wrap(copy.deepcopy(single))
    x, target = classified(world_size, 0)
    F.cross_entropy(ddp(part(x, rank).double()), part(target, rank)).backward()
    F.cross_entropy(single(x.double()), target).backward()
    same_gradients(ddp, single)


def mixed_dtypes_with_an_unused_parameter(wrap: Any, rank: int, world_size: int) -> None:
    single = seeded(lambda: Classifier(torch.float64))
    ddp = wrap(copy.deepcopy(single), find_unused_parameters=True)
    x, target = classified(world_size, 0)
    F.cross_entropy(ddp(part(x, rank).double(), False), part(target, rank)).backward()
    F.cross_entropy(single(x.double(), False), target).backward()
    same_gradients(ddp, single)
    assert ddp.module.third.weight.grad is None


def unused_in_the_first_step(wrap: Any, rank: int, world_size: int) -> None:
    """The plan of buckets, made anew after the first step, holds what that step left out."""
    single = seeded(lambda: Classifier(torch.float64))
    ddp = wrap(copy.deepcopy(single), find_unused_parameters=True)
    optimizers = [torch.optim.Adam(model.parameters()) for model in (single, ddp)]
    for step in range(3):
        x, target = classified(world_size, step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.cross_entropy(single(x.double(), step > 0), target).backward()
        F.cross_entropy(ddp(part(x, rank).double(), step > 0), part(target, rank)).backward()
        same_gradients(ddp, single)
        for optimizer in optimizers:
            optimizer.step()


def saved_and_loaded(wrap: Any, rank: int, world_size: int) -> None:
    """Six steps are three steps, a checkpoint of rank 0, and three more; bare module as well."""
    everything = classified(world_size, 0)
    mine = [part(tensor, rank) for tensor in everything]

    def train(
        model: nn.Module, steps: int, optimizer: torch.optim.Optimizer, batch: list[Tensor]
    ) -> None:
        x, target = batch
        for _ in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(model(x), target).backward()
            optimizer.step()

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    start = seeded(Classifier)
    whole, halves, bare = wrap(copy.deepcopy(start)), wrap(copy.deepcopy(start)), Classifier()
    train(whole, 6, sgd(whole), mine)
    train(halves, 3, sgd(halves), mine)
    file = io.BytesIO()
    torch.save(halves.state_dict(), file)
    content = [file.getvalue() if rank == 0 else None]
    dist.broadcast_object_list(content, src=0)
    for parameter in halves.parameters():
        nn.init.zeros_(parameter)
    state = torch.load(io.BytesIO(content[0] or b""), weights_only=True)
    halves.load_state_dict(state)
    nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")
    bare.load_state_dict(state)
    train(halves, 3, sgd(halves), mine)
    train(bare, 3, sgd(bare), list(everything))
    for expected, loaded, alone in zip(
        whole.parameters(), halves.parameters(), bare.parameters(), strict=True
    ):
        equal(loaded, expected)
        equal(alone, expected)


def sparse_gradients(wrap: Any, rank: int, world_size: int, hook: bool = False) -> None:
    single = seeded(lambda: nn.EmbeddingBag(10, 10, sparse=True))
    ddp = wrap(copy.deepcopy(single))
    if hook:
        ddp.register_comm_hook(None, average_by_hook)
    tokens = torch.randint(10, (BATCH * world_size, 2))
    single(tokens).square().mean().backward()
    ddp(part(tokens, rank)).square().mean().backward()
    for mine, expected in zip(ddp.parameters(), single.parameters(), strict=True):
        assert mine.grad is not None
        assert expected.grad is not None
        equal(mine.grad.coalesce().to_dense(), expected.grad.coalesce().to_dense())


def average_by_hook(_: object, bucket: GradBucket) -> Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    averaged: Future[Tensor] = work.get_future().then(
        lambda done: done.value()[0] / dist.get_world_size()
    )
    return averaged


def sparse_gradients_with_a_hook(wrap: Any, rank: int, world_size: int) -> None:
    sparse_gradients(wrap, rank, world_size, hook=True)


def future_of_a_hook(wrap: Any, rank: int, world_size: int) -> None:
    """The gradient is what the hook's future holds at last, `then` included."""

    def twos(_: object, bucket: GradBucket) -> Future[Tensor]:
        ones: Future[Tensor] = Future()
        ones.set_result(torch.ones_like(bucket.buffer()))
        doubled: Future[Tensor] = ones.then(lambda done: done.value() * 2)
        return doubled

    ddp = wrap(Task())
    ddp.register_comm_hook(None, twos)
    ddp(8).mean().backward()
    equal(ddp.module.p.grad, torch.full((2, 2), 2.0))


def hook_that_is_none(wrap: Any, rank: int, world_size: int) -> None:
    ddp = wrap(Task())
    with pytest.raises(TypeError, match=r"must be callable"):
        ddp.register_comm_hook(state=None, hook=1)

    def bucket_is_an_int(state: object, bucket: int) -> Future[Tensor]:
        raise AssertionError("never called")

    with pytest.raises(ValueError, match=r"bucket annotation should be dist\.GradBucket"):
        ddp.register_comm_hook(state=None, hook=bucket_is_an_int)


def hook_that_returns_no_future(wrap: Any, rank: int, world_size: int) -> None:
    ddp = wrap(Task())

    def annotated(state: object, bucket: GradBucket) -> int:
        raise AssertionError("never called")

    with pytest.raises(ValueError, match=r"return annotation should be torch\.futures\.Future"):
        ddp.register_comm_hook(state=None, hook=annotated)

    ddp = wrap(Task())
    ddp.register_comm_hook(state=None, hook=lambda state, bucket: 1)
    with pytest.raises(RuntimeError, match=r"must return a torch\.futures\.Future"):
        ddp(8).mean().backward()


def second_hook(wrap: Any, rank: int, world_size: int) -> None:
    ddp = wrap(Task())
    ddp.register_comm_hook(None, average_by_hook)
    with pytest.raises(RuntimeError, match="can only be called once"):
        ddp.register_comm_hook(None, average_by_hook)


def powersgd_that_starts_too_early(wrap: Any, rank: int, world_size: int) -> None:
    """Compression with memory cannot begin before the plan of buckets is final."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs

    module: Any = theirs if of_torch(wrap) else miniddp.hooks
    for start in (0, 1):
        with pytest.raises(ValueError, match="start_powerSGD_iter"):
            module.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=start)


def plans_of_buckets(wrap: Any, rank: int, world_size: int) -> None:
    """By reached size, the first bucket of a dtype by a limit of its own, dtypes apart."""
    same, mixed = [torch.float32] * 4, [torch.float32, torch.float64] * 3
    for dtypes, sizes, first, other, expected in [
        (same, [30, 60, 30, 10], 120, 120, [[0], [1], [2], [3]]),
        (mixed, [15, 8, 15, 8, 15, 8], 120, 120, [[0, 2], [1, 3], [4], [5]]),
        (same, [10, 10, 10, 10], 40, 80, [[0], [1, 2], [3]]),
        (mixed, [15, 8, 15, 8, 15, 8], 60, 120, [[0], [1], [2, 4], [3, 5]]),
    ]:
        tensors = [torch.empty(n, dtype=kind) for n, kind in zip(sizes, dtypes, strict=True)]
        if of_torch(wrap):
            found, _ = dist._compute_bucket_assignment_by_size(tensors, [first, other])
        else:
            num_bytes = [tensor.nbytes for tensor in tensors]
            order = range(len(tensors))
            found = miniddp.bucket.plan_buckets(num_bytes, dtypes, order, other, first)
        assert found == expected


def two_forwards_with_batch_norm(wrap: Any, rank: int, world_size: int) -> None:
    """The broadcast of buffers before the second forward leaves the first one's graph whole."""
    ddp = wrap(nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10)))
    x = torch.randn(BATCH, 10)
    (ddp(x).mean() + ddp(x).mean()).backward()
    assert all(parameter.grad is not None for parameter in ddp.parameters())


@dataclass
class Outputs:
    first: Tensor | None
    others: dict[str, Tensor]


def outputs_in_a_dataclass(wrap: Any, rank: int, world_size: int, skip: bool = False) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(20, 20), nn.Linear(20, 20)

        def forward(self, x: Tensor) -> Outputs:
            other = self.second(x)
            return Outputs(None if skip else self.first(x), {"a": other, "b": other.relu()})

    def total(model: nn.Module, x: Tensor) -> Tensor:
        outputs = model(x)
        others = outputs.others["a"] + outputs.others["b"]
        return others if outputs.first is None else others + outputs.first

    follows_one_process(wrap, rank, world_size, Model, total, find_unused_parameters=True)


def dataclass_without_one_output(wrap: Any, rank: int, world_size: int) -> None:
    outputs_in_a_dataclass(wrap, rank, world_size, skip=True)


class SecondIf(nn.Module):
    """Leaves the second layer out unless it is told to use it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 20, bias=False)
        self.second = nn.Linear(20, 20, bias=False)

    def forward(self, x: Tensor, use_second: bool) -> Tensor:
        hidden = self.first(x).relu()
        return self.second(hidden) if use_second else hidden


def control_flow(wrap: Any, rank: int, world_size: int, ranks: Iterable[int]) -> None:
    """In odd steps `ranks` use the second layer, in even steps no rank does."""
    single = seeded(SecondIf)
    ddp = wrap(copy.deepcopy(single), find_unused_parameters=True)
    for step in range(6):
        ddp.zero_grad()
        single.zero_grad()
        (x,) = joined(world_size, step, 20)
        loss = torch.zeros(())
        for other in range(world_size):
            use_second = step % 2 == 1 and other in ranks
            loss = loss + single(part(x, other), use_second).sum() / world_size
        loss.backward()
        ddp(part(x, rank), step % 2 == 1 and rank in ranks).sum().backward()
        same_gradients(ddp, single)

    ddp = wrap(seeded(SecondIf))
    (x,) = joined(world_size, 0, 20)
    ddp(x, False).sum().backward()
    with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior"):
        ddp(x, False)


def same_control_flow(wrap: Any, rank: int, world_size: int) -> None:
    control_flow(wrap, rank, world_size, range(world_size))


def control_flow_that_differs(wrap: Any, rank: int, world_size: int) -> None:
    control_flow(wrap, rank, world_size, [1])


def unused_parameters_are_reported(wrap: Any, rank: int, world_size: int) -> None:
    """The forward after a backward that left parameters out raises, and says what to do."""
    ddp = wrap(nn.Sequential(SecondIfNested()))
    x = torch.randn(BATCH, 20)
    ddp(x).sum().backward()
    with pytest.raises(RuntimeError) as raised:
        ddp(x)
    message = str(raised.value)
    assert "finished reduction in the prior iteration" in message
    assert "find_unused_parameters=True" in message


class SecondIfNested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(20)
        self.inner = SecondIf()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.norm(x), False)


def output_without_gradient(wrap: Any, rank: int, world_size: int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(20, 20, bias=False)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.first(x)
            return hidden.detach(), hidden.clone()

    def total(model: nn.Module, x: Tensor) -> Tensor:
        detached, attached = model(x)
        assert not detached.requires_grad
        return detached + attached

    for find_unused in (True, False):
        follows_one_process(
            wrap, rank, world_size, Model, total, find_unused_parameters=find_unused
        )


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


class Opaque:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def inputs_keep_their_types(wrap: Any, rank: int, world_size: int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(10, 10, bias=False)

        def forward(self, x: Any, expected: type) -> Tensor:
            assert type(x) is expected
            if isinstance(x, Opaque):
                return self.layer(x.tensor)
            first, second = x.values() if isinstance(x, dict) else x
            return self.layer(first + second)

    ddp = wrap(Model())
    a, b = torch.randn(BATCH, 10), torch.randn(BATCH, 10)
    for x in ((a, b), [a, b], Pair(a, b), {"a": a, "b": b}, Opaque(a)):
        for _ in range(2):
            ddp(x, type(x)).sum().backward()


def one_all_reduce_per_step(wrap: Any, rank: int, world_size: int) -> None:
    """One bucket is one all-reduce a step, and a step sends nothing else by all-reduce."""
    steps = 6
    ddp = wrap(nn.Linear(10, 10, bias=False))
    activities = [torch.profiler.ProfilerActivity.CPU]
    name = f"{dist.get_backend()}:all_reduce"
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        for _ in range(steps):
            ddp(torch.randn(BATCH, 10)).sum().backward()
    events = [event for event in profiler.events() or [] if event.name == name]
    assert len(events) == steps
    assert all(event.is_async for event in events)


class Raise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise OSError("on purpose")


def wrapped_again_after_an_error(wrap: Any, rank: int, world_size: int) -> None:
    """A wrapper whose backward failed is dropped; another one of the same module works."""
    module = seeded(lambda: nn.Linear(20, 20))
    single = copy.deepcopy(module)
    (x,) = joined(world_size, 0, 20)
    x.requires_grad_()
    first = wrap(module)
    with pytest.raises(OSError, match="on purpose"):
        first(Raise.apply(part(x, rank))).mean().backward()
    del first
    gc.collect()
    module.zero_grad()
    second = wrap(module)
    second(part(x, rank)).mean().backward()
    single(x).mean().backward()
    same_gradients(second, single)


def unused_parameter_under_two_names(wrap: Any, rank: int, world_size: int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(20, 20, bias=False)
            self.bias = self.unused.bias = nn.Parameter(torch.zeros(20))
            self.used = nn.Linear(20, 20)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    ddp = follows_one_process(wrap, rank, world_size, Model, find_unused_parameters=True)
    assert ddp.module.bias.grad is None


def inference_on_one_rank(wrap: Any, rank: int, world_size: int) -> None:
    """In eval mode one rank can run forward passes alone."""
    module = seeded(Classifier)
    ddp = wrap(copy.deepcopy(module))
    if rank == 0:
        ddp.eval()
        x = torch.randn(BATCH, 2)
        for _ in range(6):
            equal(ddp(x), module(x))
    dist.barrier()


def graph_that_changes(wrap: Any, rank: int, world_size: int) -> None:
    """What is unused may stay the same from step to step, or change."""
    for changes in (False, True):
        passes = iter(range(1000))
        follows_one_process(
            wrap,
            rank,
            world_size,
            SecondIf,
            lambda model, x, c=changes, p=passes: model(x, c and next(p) // 2 % 2 == 0),
            steps=6,
            find_unused_parameters=True,
        )
