"""What a DistributedDataParallel must do, as functions that run on every rank.

Each case gets `wrap`, which is miniddp's class or torch's, so that both pass the same test.
"""

import copy
import io
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from miniddp.process import device

from ..parity import row
from .ranks import all_gather

STEPS = 4
BATCH = 6
CLOSE = {"rtol": 1e-4, "atol": 1e-6}
HALF = {"rtol": 0.1, "atol": 0.02}
DEFAULT = {"rtol": 1.3e-6, "atol": 1e-5}  # of torch.testing.assert_close for fp32
BITWISE = "equal on all ranks, bit for bit"

Case = Callable[..., None]


def parity(section: str, tolerance: str | dict[str, float] = "") -> Callable[[Case], Case]:
    """What the case shows, its docstring, is a row of the book's table of parity with torch."""

    def describe(case: Case) -> Case:
        case.parity = row(section, tolerance, says=case)
        return case

    return describe


class Mlp(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(5, width)
        self.second = nn.Linear(width, width)
        self.last = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Tied(nn.Module):
    """The same matrix embeds and decodes, as in a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(tokens))))


class TwoPaths(nn.Module):
    """Uses one of two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(5, 4)
        self.left = nn.Linear(4, 3)
        self.right = nn.Linear(4, 3)

    def forward(self, x: Tensor, left: bool) -> Tensor:
        hidden = torch.tanh(self.shared(x))
        return self.left(hidden) if left else self.right(hidden)


def joined(step: int, world_size: int, batch: int = BATCH) -> tuple[Tensor, Tensor]:
    """The joined batch of a step: the same on every rank."""
    generator = torch.Generator(device()).manual_seed(1000 + step)
    x = torch.randn(world_size * batch, 5, generator=generator)
    return x, torch.randint(3, (world_size * batch,), generator=generator)


def part(rank: int, world_size: int, *tensors: Tensor) -> list[Tensor]:
    """This rank's part of joined tensors."""
    return [t.chunk(world_size)[rank] for t in tensors]


def seeded(build: Any, rank: int) -> nn.Module:
    """A model whose weights differ from rank to rank before it is wrapped."""
    torch.manual_seed(7 + rank)
    return build()


def reference(build: Any) -> nn.Module:
    """Rank 0's model, on every rank."""
    return seeded(build, 0)


def assert_same(actual: nn.Module, expected: nn.Module, what: str, **tolerance: float) -> None:
    tolerance = tolerance or CLOSE
    for (name, a), b in zip(actual.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b, msg=lambda m, n=name: f"{what}, {n}: {m}", **tolerance)
        if b.grad is None:
            assert a.grad is None or not a.grad.any(), f"{what}: {name} should have no gradient"
            continue
        torch.testing.assert_close(
            a.grad, b.grad, msg=lambda m, n=name: f"{what}, gradient of {n}: {m}", **tolerance
        )


def assert_equal_on_all_ranks(model: nn.Module) -> None:
    """Bit for bit: ranks that differ by rounding would drift apart."""
    for name, parameter in model.named_parameters():
        for tensor in (parameter.detach(), parameter.grad):
            if tensor is None:
                continue
            assert all(torch.equal(tensor, other) for other in all_gather(tensor)), name


@parity("averaging", CLOSE)
def follows_single_process(
    wrap: Any,
    rank: int,
    world_size: int,
    build: Any = Mlp,
    set_to_none: bool = True,
    **options: Any,
) -> None:
    """Several steps on parts of a batch equal the same steps of one process on the whole batch."""
    model = seeded(build, rank)
    if rank > 0:
        assert any(
            not torch.equal(a, b)
            for a, b in zip(model.parameters(), reference(build).parameters(), strict=True)
        )
    ddp, single = wrap(model, **options), reference(build)
    ours = torch.optim.SGD(ddp.parameters(), lr=0.3, momentum=0.9)
    theirs = torch.optim.SGD(single.parameters(), lr=0.3, momentum=0.9)
    for step in range(STEPS):
        x, y = joined(step, world_size)
        ours.zero_grad(set_to_none=set_to_none)
        theirs.zero_grad(set_to_none=set_to_none)
        local_x, local_y = part(rank, world_size, x, y)
        F.cross_entropy(ddp(local_x), local_y).backward()
        F.cross_entropy(single(x), y).backward()
        assert_same(ddp.module, single, f"step {step}")
        assert_equal_on_all_ranks(ddp)
        ours.step()
        theirs.step()


@parity("averaging", CLOSE)
def zeroed_gradients(wrap: Any, rank: int, world_size: int) -> None:
    """The same after `zero_grad(set_to_none=False)`."""
    follows_single_process(wrap, rank, world_size, set_to_none=False)


@parity("averaging", CLOSE)
def small_buckets(wrap: Any, rank: int, world_size: int) -> None:
    """The same with many small buckets."""
    follows_single_process(wrap, rank, world_size, bucket_cap_mb=0.0005)


@parity("averaging", CLOSE)
def gradients_not_views(wrap: Any, rank: int, world_size: int) -> None:
    """The same with `gradient_as_bucket_view=False`."""
    follows_single_process(wrap, rank, world_size, gradient_as_bucket_view=False)
    follows_single_process(wrap, rank, world_size, set_to_none=False, gradient_as_bucket_view=False)


@parity("averaging")
def gradients_are_views(wrap: Any, rank: int, world_size: int) -> None:
    """With `gradient_as_bucket_view=True` the gradients of a bucket lie in one block of memory."""
    ddp = wrap(Mlp(), gradient_as_bucket_view=True)
    for _ in range(2):
        ddp(torch.randn(2, 5)).sum().backward()
    storages = {p.grad.untyped_storage().data_ptr() for p in ddp.parameters()}
    assert len(storages) < len(list(ddp.parameters()))


@parity("averaging", CLOSE)
def accumulation(wrap: Any, rank: int, world_size: int) -> None:
    """k micro-batches, all but the last under `no_sync`, equal one large batch."""
    for count in (1, 2, 3, 4):
        for set_to_none in (True, False):
            ddp, single = wrap(seeded(Mlp, rank)), reference(Mlp)
            for step in range(2):
                ddp.zero_grad(set_to_none=set_to_none)
                single.zero_grad(set_to_none=set_to_none)
                for micro in range(count):
                    x, y = joined(10 * step + micro, world_size)
                    local_x, local_y = part(rank, world_size, x, y)
                    last = micro == count - 1
                    with nullcontext() if last else ddp.no_sync():
                        (F.cross_entropy(ddp(local_x), local_y) / count).backward()
                    (F.cross_entropy(single(x), y) / count).backward()
                    if not last and world_size > 1:
                        assert_differs_between_ranks(ddp)
                assert_same(ddp.module, single, f"{count} micro-batches")
                assert_equal_on_all_ranks(ddp)
                with torch.no_grad():
                    for a, b in zip(ddp.parameters(), single.parameters(), strict=True):
                        a -= 0.1 * a.grad
                        b -= 0.1 * b.grad


def assert_differs_between_ranks(model: nn.Module) -> None:
    gradient = next(model.parameters()).grad
    others = all_gather(gradient)
    assert all(not torch.allclose(a, b) for i, a in enumerate(others) for b in others[i + 1 :]), (
        "gradients are synchronised already"
    )


@parity("averaging")
def gradients_are_synchronised_only_by_ddp(wrap: Any, rank: int, world_size: int) -> None:
    """Gradients stay the rank's own if the bare module ran, or if forward was inside `no_sync`."""
    if world_size == 1:
        return
    ddp = wrap(seeded(Mlp, rank))
    x, y = part(rank, world_size, *joined(0, world_size))
    F.cross_entropy(ddp.module(x), y).backward()
    assert_differs_between_ranks(ddp)
    ddp.zero_grad()
    with ddp.no_sync():
        loss = F.cross_entropy(ddp(x), y)
    loss.backward()
    assert_differs_between_ranks(ddp)
    ddp.zero_grad()
    loss = F.cross_entropy(ddp(x), y)
    with ddp.no_sync():
        loss.backward()
    assert_equal_on_all_ranks(ddp)


@parity("averaging", BITWISE)
def no_sync_is_restored_after_an_exception(wrap: Any, rank: int, world_size: int) -> None:
    """After an exception inside `no_sync` gradients are averaged again."""
    ddp = wrap(seeded(Mlp, rank))
    with pytest.raises(KeyError), ddp.no_sync():
        raise KeyError("inside")
    assert ddp.require_backward_grad_sync
    x, y = part(rank, world_size, *joined(0, world_size))
    F.cross_entropy(ddp(x), y).backward()
    assert_equal_on_all_ranks(ddp)


@parity("averaging", CLOSE)
def two_backwards_accumulate(wrap: Any, rank: int, world_size: int) -> None:
    """Without `zero_grad` the means of several steps add up, views or not."""
    for views in (False, True):
        ddp = wrap(seeded(Mlp, rank), gradient_as_bucket_view=views, bucket_cap_mb=0.0005)
        single = reference(Mlp)
        for step in range(3):
            x, y = joined(step, world_size)
            local_x, local_y = part(rank, world_size, x, y)
            F.cross_entropy(ddp(local_x), local_y).backward()
            F.cross_entropy(single(x), y).backward()
            assert_same(ddp.module, single, f"step {step}")


@parity("averaging", CLOSE)
def several_forwards(wrap: Any, rank: int, world_size: int) -> None:
    """Two forward passes and one backward through the sum of their losses."""
    ddp, single = wrap(seeded(Mlp, rank)), reference(Mlp)
    for step in range(3):
        ddp.zero_grad()
        single.zero_grad()
        a, b = joined(2 * step, world_size), joined(2 * step + 1, world_size)
        mine = [F.cross_entropy(ddp(x), y) for x, y in (part(rank, world_size, *t) for t in (a, b))]
        sum(mine).backward()
        sum(F.cross_entropy(single(x), y) for x, y in (a, b)).backward()
        assert_same(ddp.module, single, f"step {step}")
        assert_equal_on_all_ranks(ddp)


@parity("models", CLOSE)
def tied_weights(wrap: Any, rank: int, world_size: int) -> None:
    """A weight that is used in two places is averaged once."""
    ddp, single = wrap(seeded(Tied, rank)), reference(Tied)
    for step in range(3):
        generator = torch.Generator(device()).manual_seed(step)
        tokens = torch.randint(11, (4 * world_size, 6), generator=generator)
        (local,) = part(rank, world_size, tokens)
        ddp.zero_grad()
        single.zero_grad()
        F.cross_entropy(ddp(local).flatten(0, 1), local.flatten()).backward()
        F.cross_entropy(single(tokens).flatten(0, 1), tokens.flatten()).backward()
        assert_same(ddp.module, single, f"step {step}")
    assert ddp.module.head.weight is ddp.module.embed.weight


@parity("models", CLOSE)
def frozen_parameters(wrap: Any, rank: int, world_size: int) -> None:
    """Parameters frozen before wrapping stay as they are."""

    def build() -> nn.Module:
        model = Mlp()
        model.second.requires_grad_(False)
        return model

    follows_single_process(wrap, rank, world_size, build=build)


@parity("models", HALF)
def mixed_dtypes(wrap: Any, rank: int, world_size: int) -> None:
    """Parameters of fp32, fp64 and bf16 in one module keep their dtypes."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(5, 8)
            self.b = nn.Linear(8, 8, dtype=torch.float64)
            self.c = nn.Linear(8, 3, dtype=torch.bfloat16)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.b(self.a(x).double()).bfloat16()).float()

    ddp, single = wrap(seeded(Mixed, rank)), reference(Mixed)
    for step in range(3):
        ddp.zero_grad()
        single.zero_grad()
        x, y = joined(step, world_size)
        local_x, local_y = part(rank, world_size, x, y)
        F.cross_entropy(ddp(local_x), local_y).backward()
        F.cross_entropy(single(x), y).backward()
        assert_same(ddp.module, single, f"step {step}", **HALF)
        assert_equal_on_all_ranks(ddp)
        assert [p.grad.dtype for p in ddp.parameters()] == [p.dtype for p in ddp.parameters()]


@parity("wrapping", DEFAULT)
def batch_norm_buffers(wrap: Any, rank: int, world_size: int) -> None:
    """Before a forward pass the buffers are rank 0's; between two of them they differ."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))

    ddp = wrap(seeded(build, rank))
    single = reference(build)
    for step in range(3):
        x, y = joined(step, world_size)
        local_x, local_y = part(rank, world_size, x, y)
        F.cross_entropy(ddp(local_x), local_y).backward()
        single(x.chunk(world_size)[0])
        if rank > 0:
            assert not torch.allclose(ddp.module[1].running_mean, single[1].running_mean)
    ddp.eval()
    with torch.no_grad():
        ddp(torch.zeros(2, 5))
    for ours, theirs in zip(ddp.module.buffers(), single.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


@parity("wrapping")
def buffers_left_alone(wrap: Any, rank: int, world_size: int) -> None:
    """With `broadcast_buffers=False` every rank keeps its own buffers."""
    if world_size == 1:
        return
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    module[1].num_batches_tracked += rank
    with pytest.warns(FutureWarning, match="broadcast_buffers"):
        ddp = wrap(module, broadcast_buffers=False)
    assert module[1].num_batches_tracked == rank
    module[1].num_batches_tracked.zero_()
    for _ in range(2):
        ddp(torch.randn(8, 5)).sum().backward()
    ddp.eval()
    with torch.no_grad():
        ddp(torch.zeros(2, 5))
    means = all_gather(ddp.module[1].running_mean)
    assert not any(torch.equal(means[0], mean) for mean in means[1:])


@parity("wrapping", CLOSE)
def initial_buffers_and_weights(wrap: Any, rank: int, world_size: int) -> None:
    """Wrapping copies rank 0's weights and buffers; its state has `module.` before each key."""

    def build() -> nn.Module:
        model = Mlp()
        model.register_buffer("noise", torch.randn(4))
        return model

    ddp = wrap(seeded(build, rank))
    expected = reference(build)
    assert_same(ddp.module, expected, "after wrapping")
    torch.testing.assert_close(ddp.module.noise, expected.noise)
    assert list(ddp.state_dict()) == [f"module.{k}" for k in expected.state_dict()]


@parity("averaging", CLOSE)
def unused_parameters(wrap: Any, rank: int, world_size: int) -> None:
    """With `find_unused_parameters=True` ranks may use different branches, or none."""
    ddp = wrap(seeded(TwoPaths, rank), find_unused_parameters=True)
    single = reference(TwoPaths)
    for step in range(4):
        ddp.zero_grad()
        single.zero_grad()
        x, y = joined(step, world_size)
        lefts = [(step + r) % 2 == 0 for r in range(world_size)]
        local_x, local_y = part(rank, world_size, x, y)
        F.cross_entropy(ddp(local_x, lefts[rank]), local_y).backward()
        for left, xs, ys in zip(lefts, x.chunk(world_size), y.chunk(world_size), strict=True):
            (F.cross_entropy(single(xs, left), ys) / world_size).backward()
        assert_same(ddp.module, single, f"step {step}")
        if world_size == 1:
            unused = ddp.module.right if lefts[0] else ddp.module.left
            assert unused.weight.grad is None, "an unused parameter's gradient was touched"


@parity("models", CLOSE)
def gradient_checkpointing(wrap: Any, rank: int, world_size: int) -> None:
    """Activation checkpointing, re-entrant or not."""
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Mlp):
        def __init__(self, use_reentrant: bool) -> None:
            super().__init__()
            self.use_reentrant = use_reentrant

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            x = checkpoint(self.middle, x, use_reentrant=self.use_reentrant)
            return self.last(x)

        def middle(self, x: Tensor) -> Tensor:
            return torch.tanh(self.second(x))

    for use_reentrant in (False, True):
        build = partial(Checkpointed, use_reentrant)
        follows_single_process(wrap, rank, world_size, build=build)


@parity("averaging", CLOSE)
def clipping(wrap: Any, rank: int, world_size: int) -> None:
    """Clipping by the norm of all gradients."""
    ddp, single = wrap(seeded(Mlp, rank)), reference(Mlp)
    x, y = joined(0, world_size)
    local_x, local_y = part(rank, world_size, x, y)
    (100 * F.cross_entropy(ddp(local_x), local_y)).backward()
    (100 * F.cross_entropy(single(x), y)).backward()
    ours = nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
    theirs = nn.utils.clip_grad_norm_(single.parameters(), 1.0)
    torch.testing.assert_close(ours, theirs)
    assert_same(ddp.module, single, "clipped")


@parity("models", HALF)
def autocast(wrap: Any, rank: int, world_size: int) -> None:
    """Autocast to bf16."""
    ddp, single = wrap(seeded(Mlp, rank)), reference(Mlp)
    for step in range(2):
        ddp.zero_grad()
        single.zero_grad()
        x, y = joined(step, world_size)
        local_x, local_y = part(rank, world_size, x, y)
        with torch.autocast(device().type, dtype=torch.bfloat16):
            ours = F.cross_entropy(ddp(local_x), local_y)
            theirs = F.cross_entropy(single(x), y)
        ours.backward()
        theirs.backward()
        assert_same(ddp.module, single, f"step {step}", **HALF)
        assert_equal_on_all_ranks(ddp)


@parity("models", CLOSE)
def nested_outputs(wrap: Any, rank: int, world_size: int) -> None:
    """Outputs in nested dictionaries and tuples; a loss that uses some of them."""

    class Nested(Mlp):
        def forward(self, x: Tensor) -> dict[str, Any]:
            out = super().forward(x)
            return {"logits": out, "extra": (out.exp(), [out.detach()])}

    ddp, single = wrap(seeded(Nested, rank)), reference(Nested)
    for step in range(2):
        ddp.zero_grad()
        single.zero_grad()
        x, y = joined(step, world_size)
        local_x, local_y = part(rank, world_size, x, y)
        F.cross_entropy(ddp(local_x)["logits"], local_y).backward()
        F.cross_entropy(single(x)["logits"], y).backward()
        assert_same(ddp.module, single, f"step {step}")


@parity("averaging", CLOSE)
def sub_group(wrap: Any, rank: int, world_size: int) -> None:
    """Two process groups side by side average only among themselves."""
    if world_size < 4:
        return
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = rank // 2
    ddp = wrap(seeded(Mlp, rank), process_group=groups[mine])
    single = seeded(Mlp, 2 * mine)
    for step in range(3):
        ddp.zero_grad()
        single.zero_grad()
        x, y = joined(10 * mine + step, 2)
        local_x, local_y = part(rank % 2, 2, x, y)
        F.cross_entropy(ddp(local_x), local_y).backward()
        F.cross_entropy(single(x), y).backward()
        assert_same(ddp.module, single, f"step {step}")


@parity("models", CLOSE)
def compiled_module(wrap: Any, rank: int, world_size: int) -> None:
    """A compiled module."""

    def build() -> nn.Module:
        model = Mlp()
        model.compile(backend="aot_eager")
        return model

    follows_single_process(wrap, rank, world_size, build=build)


class Crossed(nn.Module):
    """Two branches of different size; the rank decides which of them backward reaches first."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(5, 3)
        self.large = nn.Sequential(nn.Linear(5, 40), nn.Linear(40, 3))

    def forward(self, x: Tensor, small_first: bool) -> Tensor:
        branches = [self.small, self.large] if small_first else [self.large, self.small]
        return branches[0](x) + branches[1](x)


@parity("averaging", CLOSE)
def ready_order_differs(wrap: Any, rank: int, world_size: int) -> None:
    """Gradients become ready in another order on each rank."""
    ddp, single = wrap(seeded(Crossed, rank), bucket_cap_mb=0.0001), reference(Crossed)
    for step in range(STEPS):
        ddp.zero_grad()
        single.zero_grad()
        x, y = joined(step, world_size)
        local_x, local_y = part(rank, world_size, x, y)
        F.cross_entropy(ddp(local_x, rank % 2 == 0), local_y).backward()
        F.cross_entropy(single(x, True), y).backward()
        assert_same(ddp.module, single, f"step {step}")
        assert_equal_on_all_ranks(ddp)


@parity("models", CLOSE)
def channels_last(wrap: Any, rank: int, world_size: int) -> None:
    """Convolutions in `channels_last` memory format."""

    def build() -> nn.Module:
        return nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)

    ddp, single = wrap(seeded(build, rank)), reference(build)
    for step in range(2):
        ddp.zero_grad()
        single.zero_grad()
        generator = torch.Generator(device()).manual_seed(step)
        x = torch.randn(2 * world_size, 4, 5, 5, generator=generator)
        (local,) = part(rank, world_size, x)
        ddp(local).square().mean().backward()
        single(x).square().mean().backward()
        assert_same(ddp.module, single, f"step {step}")


@parity("hooks", "fp32: rtol 1e-4; fp16: rtol 0.01; PowerSGD: atol 0.2")
def hooks_of_torch(wrap: Any, rank: int, world_size: int) -> None:
    """torch's own hooks: all-reduce, fp16 compression, PowerSGD."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    for hook, tolerance in (
        (default_hooks.allreduce_hook, {}),
        (default_hooks.fp16_compress_hook, {"rtol": 0.01, "atol": 1e-3}),
        (default_hooks.bf16_compress_hook, {"rtol": 0.05, "atol": 5e-3}),
    ):
        if hook is default_hooks.bf16_compress_hook and wrap is nn.parallel.DistributedDataParallel:
            continue  # torch allows this hook over NCCL only
        _with_hook(wrap, rank, world_size, None, hook, tolerance)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=8, start_powerSGD_iter=2)
    _with_hook(wrap, rank, world_size, state, powerSGD_hook.powerSGD_hook, {"atol": 0.2, "rtol": 1})


@parity("hooks", "exact")
def own_hook(wrap: Any, rank: int, world_size: int) -> None:
    """A hook sees every bucket once and in order, and its result becomes the gradient."""
    seen: list[tuple[int, bool, int, int]] = []

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        shapes = [tuple(g.shape) for g in bucket.gradients()]
        assert shapes == [tuple(p.shape) for p in bucket.parameters()]
        assert sum(g.numel() for g in bucket.gradients()) == bucket.buffer().numel()
        state.append((bucket.index(), bucket.is_last()))
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(torch.full_like(bucket.buffer(), 3.0))
        return future

    ddp = wrap(seeded(Mlp, rank), bucket_cap_mb=0.0005)
    ddp.register_comm_hook(seen, hook)
    for _ in range(2):
        seen.clear()
        ddp(torch.randn(2, 5)).sum().backward()
        assert [index for index, _ in seen] == list(range(len(seen)))
        assert [last for _, last in seen] == [False] * (len(seen) - 1) + [True]
        assert all((p.grad == 3.0).all() for p in ddp.parameters())
        ddp.zero_grad()


@parity("hooks", DEFAULT)
def full_buckets(wrap: Any, rank: int, world_size: int) -> None:
    """A bucket is sent when all of its gradients are in it, in every step."""
    sent: dict[int, Tensor] = {}

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buffer, gradients = bucket.buffer(), bucket.gradients()
        for parameter, gradient in zip(bucket.parameters(), gradients, strict=True):
            sent[parameter.data_ptr()] = gradient.clone()
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(buffer)
        return future

    ddp, twin = wrap(seeded(Mlp, rank), bucket_cap_mb=0.0005), reference(Mlp)
    ddp.register_comm_hook(None, hook)
    for step in range(STEPS):
        sent.clear()
        ddp.zero_grad()
        twin.zero_grad()
        x, y = part(rank, world_size, *joined(step, world_size))
        F.cross_entropy(ddp(x), y).backward()
        F.cross_entropy(twin(x), y).backward()
        for ours, theirs in zip(ddp.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(sent[ours.data_ptr()], theirs.grad)


def _with_hook(
    wrap: Any, rank: int, world_size: int, state: Any, hook: Any, tolerance: dict[str, float]
) -> None:
    ddp, single = wrap(seeded(Mlp, rank)), reference(Mlp)
    ddp.register_comm_hook(state, hook)
    for step in range(4):
        ddp.zero_grad()
        single.zero_grad()
        x, y = joined(step, world_size)
        local_x, local_y = part(rank, world_size, x, y)
        F.cross_entropy(ddp(local_x), local_y).backward()
        F.cross_entropy(single(x), y).backward()
        assert_same(ddp.module, single, f"{hook.__name__}, step {step}", **tolerance)
        assert_equal_on_all_ranks(ddp)


@parity("wrapping")
def no_trainable_parameter(wrap: Any, rank: int, world_size: int) -> None:
    """A module without a trainable parameter is refused."""
    with pytest.raises(RuntimeError, match=r"requires? a gradient"):
        wrap(Mlp().requires_grad_(False))


@parity("wrapping")
def different_structure(wrap: Any, rank: int, world_size: int) -> None:
    """Modules of different shapes on different ranks are refused."""
    if world_size == 1:
        return
    with pytest.raises((RuntimeError, ValueError)):
        wrap(Mlp(width=16 + (rank == 1)))


@parity("wrapping", BITWISE)
def wrapped_again_when_the_first_is_gone(wrap: Any, rank: int, world_size: int) -> None:
    """A module can be wrapped again when its first wrapper is gone."""
    model = seeded(Mlp, rank)
    for _ in range(2):
        ddp = wrap(model)
        ddp(torch.randn(2, 5)).sum().backward()
        assert_equal_on_all_ranks(ddp)
        ddp.zero_grad()
        del ddp


@parity("wrapping")
def copied(wrap: Any, rank: int, world_size: int) -> None:
    """The module inside can be deep-copied; the copy is not synchronised."""
    ddp = wrap(seeded(Mlp, rank))
    twin = copy.deepcopy(ddp.module)
    twin(torch.randn(2, 5)).sum().backward()
    assert all(p.grad is None for p in ddp.parameters())


@parity("wrapping", CLOSE)
def copied_wrapper(wrap: Any, rank: int, world_size: int) -> None:
    """The wrapper can be deep-copied and pickled; the copy averages on its own."""
    ddp = wrap(seeded(Mlp, rank))
    ddp(torch.randn(2, 5)).sum().backward()
    ddp.zero_grad()
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    single = reference(Mlp)
    x, y = joined(0, world_size)
    F.cross_entropy(single(x), y).backward()
    for twin in (copy.deepcopy(ddp), torch.load(file, weights_only=False)):
        local_x, local_y = part(rank, world_size, x, y)
        F.cross_entropy(twin(local_x), local_y).backward()
        assert_same(twin.module, single, "copy")
    assert all(p.grad is None for p in ddp.parameters())


@parity("averaging", BITWISE)
def frozen_for_a_pass(wrap: Any, rank: int, world_size: int) -> None:
    """A GAN's discriminator, frozen while gradients pass through it to the generator."""
    generator, critic = wrap(nn.Linear(5, 5)), wrap(Mlp())
    for _ in range(3):
        critic.requires_grad_(False)
        critic(generator(torch.randn(4, 5))).sum().backward()
        assert_equal_on_all_ranks(generator)
        assert all(p.grad is None for p in critic.parameters())
        critic.requires_grad_(True)
        (critic(torch.randn(4, 5)).sum() - critic(torch.randn(4, 5)).square().sum()).backward()
        assert_equal_on_all_ranks(critic)
        generator.zero_grad()
        critic.zero_grad()


@parity("averaging", CLOSE)
def gradients_of_other_tensors(wrap: Any, rank: int, world_size: int) -> None:
    """`autograd.grad` with respect to inputs and outputs leaves the parameters alone."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (F.cross_entropy(model(x), y) * len(x)).backward(inputs=[x])
        out = model(x)
        (of_x,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (of_out,) = torch.autograd.grad(F.cross_entropy(out, y), out, retain_graph=True)
        attacked = model(x.detach() + 0.1 * x.grad.sign())
        penalty = of_x.square().sum() / len(x)
        return F.cross_entropy(attacked, y) + (of_out.detach() * out).sum() + penalty

    ddp, single = wrap(seeded(Mlp, rank)), reference(Mlp)
    for step in range(3):
        ddp.zero_grad()
        single.zero_grad()
        x, y = joined(step, world_size)
        loss(ddp, *part(rank, world_size, x, y)).backward()
        loss(single, x, y).backward()
        assert_same(ddp.module, single, f"step {step}")


@parity("averaging", CLOSE)
def hidden_state_of_an_earlier_forward(wrap: Any, rank: int, world_size: int) -> None:
    """A backward pass that goes on through the graph of an earlier forward pass."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(5, 5)

        def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
            return torch.tanh(self.cell(x + hidden))

    ddp, single = wrap(seeded(Recurrent, rank)), reference(Recurrent)
    ours, theirs = torch.zeros(BATCH, 5), torch.zeros(BATCH * world_size, 5)
    for step in range(3):
        x, _ = joined(step, world_size)
        ours, theirs = ddp(*part(rank, world_size, x), ours), single(x, theirs)
        ours.mean().backward(retain_graph=True)
        theirs.mean().backward(retain_graph=True)
        assert_same(ddp.module, single, f"step {step}")


@parity("averaging", CLOSE)
def gradient_data_replaced(wrap: Any, rank: int, world_size: int) -> None:
    """`.grad.data` is pointed to other memory between steps, as old code does."""
    for set_to_none in (True, False):
        ddp, single = wrap(seeded(Mlp, rank)), reference(Mlp)
        for step in range(STEPS):
            ddp.zero_grad(set_to_none=set_to_none)
            single.zero_grad(set_to_none=set_to_none)
            x, y = joined(step, world_size)
            local_x, local_y = part(rank, world_size, x, y)
            F.cross_entropy(ddp(local_x), local_y).backward()
            F.cross_entropy(single(x), y).backward()
            assert_same(ddp.module, single, f"step {step}")
            for parameter in [*ddp.parameters(), *single.parameters()]:
                parameter.grad.data = parameter.grad.data * 0.5


@parity("models", CLOSE)
def odd_parameters(wrap: Any, rank: int, world_size: int) -> None:
    """Scalar, empty, complex and transposed parameters."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)
            self.scalar = nn.Parameter(torch.tensor(1.5))
            self.empty = nn.Parameter(torch.zeros(0, 3))
            self.complex = nn.Parameter(torch.randn(3, dtype=torch.complex64))
            self.transposed = nn.Parameter(torch.randn(3, 4).t())

        def forward(self, x: Tensor) -> Tensor:
            bias = self.complex.abs().square() + self.transposed.sum(0)
            return self.layer(x) * self.scalar + bias + self.empty.sum()

    follows_single_process(wrap, rank, world_size, build=Odd, bucket_cap_mb=0)


@parity("wrapping", "exact")
def buffers_of_any_strides(wrap: Any, rank: int, world_size: int) -> None:
    """Buffers that are views of other memory, of any dtype, become rank 0's, and nothing else."""

    class Buffers(nn.Linear):
        def __init__(self) -> None:
            super().__init__(5, 3)
            self.table = torch.full((4, 6), float(rank))
            self.register_buffer("every_second", self.table[:, ::2])
            self.register_buffer("transposed", torch.full((2, 3), float(rank)).t())
            self.register_buffer("flag", torch.tensor(rank == 0))
            self.register_buffer("count", torch.tensor(rank))

    ddp = wrap(Buffers())
    for step in range(2):
        for buffer in ddp.module.buffers():
            buffer.fill_(rank == 0) if buffer.dtype == torch.bool else buffer.fill_(rank + step)
        ddp(torch.randn(2, 5)).sum().backward()
        assert (ddp.module.every_second == step).all()
        assert (ddp.module.transposed == step).all()
        assert ddp.module.flag
        assert ddp.module.count == step
        assert (ddp.module.table[:, 1::2] == rank).all()


@parity("averaging", CLOSE)
def two_losses_of_disjoint_parameters(wrap: Any, rank: int, world_size: int) -> None:
    """An actor and a critic: one forward pass, a backward pass for each of its two outputs."""

    class ActorCritic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.actor, self.critic = Mlp(), Mlp()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.actor(x), self.critic(x)

    ddp, single = wrap(seeded(ActorCritic, rank)), reference(ActorCritic)
    for step in range(STEPS):
        ddp.zero_grad()
        single.zero_grad()
        x, y = joined(step, world_size)
        local_x, local_y = part(rank, world_size, x, y)
        for model, inputs, targets in ((ddp, local_x, local_y), (single, x, y)):
            for output in model(inputs):
                F.cross_entropy(output, targets).backward()
        assert_same(ddp.module, single, f"step {step}")
        assert_equal_on_all_ranks(ddp)


@parity("averaging")
def a_missing_gradient(wrap: Any, rank: int, world_size: int) -> None:
    """After a backward pass that left a gradient out the next forward pass raises."""
    ddp = wrap(TwoPaths())
    ddp(torch.randn(3, 5), True).sum().backward()
    with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior it"):
        ddp(torch.randn(3, 5), True)


@parity("averaging")
def wrapped_twice(wrap: Any, rank: int, world_size: int) -> None:
    """A module that is wrapped while another wrapper lives: the earlier one averages no more."""
    module = Mlp()
    first = wrap(module)
    second = wrap(module)
    second(torch.randn(3, 5)).sum().backward()
    assert_equal_on_all_ranks(second)
    del first


@parity("averaging")
def outputs_left_out_of_the_loss(wrap: Any, rank: int, world_size: int) -> None:
    """With `find_unused_parameters=True` an output may stay out of the loss."""

    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(5, 3) for _ in range(2))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {str(i): head(x) for i, head in enumerate(self.heads)}

    ddp = wrap(seeded(TwoHeads, rank), find_unused_parameters=True)
    for step in range(STEPS):
        ddp.zero_grad()
        ddp(torch.randn(3, 5))[str(step % 2)].sum().backward()
        assert_equal_on_all_ranks(ddp.module.heads[step % 2])
        unused = ddp.module.heads[1 - step % 2].weight.grad
        assert unused is None


BOTH = [
    follows_single_process,
    zeroed_gradients,
    small_buckets,
    gradients_not_views,
    gradients_are_views,
    accumulation,
    gradients_are_synchronised_only_by_ddp,
    no_sync_is_restored_after_an_exception,
    two_backwards_accumulate,
    several_forwards,
    tied_weights,
    frozen_parameters,
    mixed_dtypes,
    batch_norm_buffers,
    buffers_left_alone,
    initial_buffers_and_weights,
    unused_parameters,
    gradient_checkpointing,
    clipping,
    autocast,
    nested_outputs,
    sub_group,
    ready_order_differs,
    channels_last,
    hooks_of_torch,
    own_hook,
    full_buckets,
    no_trainable_parameter,
    different_structure,
    wrapped_again_when_the_first_is_gone,
    copied,
    copied_wrapper,
    frozen_for_a_pass,
    gradients_of_other_tensors,
    hidden_state_of_an_earlier_forward,
    gradient_data_replaced,
    odd_parameters,
    compiled_module,
    buffers_of_any_strides,
    two_losses_of_disjoint_parameters,
    a_missing_gradient,
    wrapped_twice,
    outputs_left_out_of_the_loss,
]
