"""Sharded optimizer and sharded module, step by step against one process on the joined batch.

Starting ranks takes longer than what they do, so one launch runs many cases.
"""

import copy
import gc
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import miniddp
from instruments import memory
from miniddp import ring
from miniddp.process import device, init_process_group
from miniddp.zero import FullyShardedModule, ShardedOptimizer

from ..parity import row
from .ddp_cases import CLOSE, Mlp, Tied, joined, part, reference, seeded
from .ranks import all_gather, run

STEPS = 4


def close(actual: Any, expected: Any, what: str) -> None:
    torch.testing.assert_close(actual, expected, **CLOSE, msg=lambda message: f"{what}: {message}")


def run_cases(rank: int, cases: list[Callable[..., None]], *args: Any) -> None:
    warnings.simplefilter("ignore")
    for case in cases:
        torch.manual_seed(rank)
        try:
            case(*args, rank, dist.get_world_size())
        except BaseException as error:
            error.args = (f"{case.__name__}: {error}", *error.args[1:])
            raise


def fails_on_every_rank(world_size: int, fn: Callable[[int], Any]) -> list[str]:
    messages = run(message_of, world_size, fn)
    assert all(messages), messages
    return list(messages)


def message_of(rank: int, fn: Callable[[int], Any]) -> str:
    try:
        fn(rank)
    except (RuntimeError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def nbytes(tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of state that grow with the parameters; not the step counters."""
    return nbytes(
        value
        for state in optimizer.state.values()
        for name, value in state.items()
        if isinstance(value, Tensor) and name != "step"
    )


# The sharded optimizer

SHARDED = {"miniddp": ShardedOptimizer, "torch": ZeroRedundancyOptimizer}
RECIPES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD with momentum": (torch.optim.SGD, {"lr": 0.3, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, {"lr": 0.02}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
}


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """As in practice: no weight decay for biases, and a learning rate of their own."""
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if "bias" not in name]},
        {"params": [p for name, p in named if "bias" in name], "weight_decay": 0.0, "lr": 0.01},
    ]


def backward(ddp: nn.Module, x: Tensor, y: Tensor) -> None:
    nn.functional.cross_entropy(ddp(x), y).backward()
    if isinstance(ddp, miniddp.SimpleDDP):
        ddp.sync_gradients()


def train_pair(
    ddp: nn.Module, ours: Any, single: nn.Module, theirs: Any, rank: int, size: int, *schedules: Any
) -> None:
    """The same steps for the replicas and for one process; both must be the same after each."""
    for step in range(STEPS):
        batch = joined(step, size)
        backward(ddp, *part(rank, size, *batch))
        backward(single, *batch)
        before = [p.detach().clone() for p in single.parameters()]
        ours.step()
        theirs.step()
        for schedule in schedules:
            schedule.step()
        for (name, p), q, old in zip(
            ddp.named_parameters(), single.parameters(), before, strict=True
        ):
            assert not torch.equal(q, old), f"step {step} did not move {name}"
            close(p.grad, q.grad, f"step {step}, gradient of {name}")
            close(p, q, f"step {step}, {name}")
        ours.zero_grad()
        theirs.zero_grad()


def follows_unsharded(sharded: Any, rank: int, size: int) -> None:
    """A sharded optimizer takes the steps of the whole one: SGD, Adam, AdamW, Adagrad."""
    for name, (optimizer_class, options) in RECIPES.items():
        for wrap in (miniddp.SimpleDDP, miniddp.DistributedDataParallel):
            ddp, single = wrap(reference(Mlp)), reference(Mlp)
            ours = sharded(ddp.parameters(), optimizer_class, **options)
            theirs = optimizer_class(single.parameters(), **options)
            try:
                train_pair(ddp, ours, single, theirs, rank, size)
            except AssertionError as error:
                raise AssertionError(f"{name} on {wrap.__name__}: {error}") from error


def with_groups(sharded: Any, rank: int, size: int, schedule: Callable[[Any], Any]) -> Any:
    ddp, single = miniddp.SimpleDDP(reference(Mlp)), reference(Mlp)
    ours = sharded(groups(ddp), torch.optim.AdamW, lr=0.02)
    theirs = torch.optim.AdamW(groups(single), lr=0.02)
    assert [len(group["params"]) for group in ours.param_groups] == [3, 3]
    assert ours.param_groups[1]["lr"] == 0.01
    before = copy.deepcopy([{**group, "params": None} for group in ours.param_groups])
    train_pair(ddp, ours, single, theirs, rank, size, schedule(ours), schedule(theirs))
    for group, other, old in zip(ours.param_groups, theirs.param_groups, before, strict=True):
        assert group["lr"] == other["lr"] != old["lr"]
    return before, ours.param_groups


def follows_with_groups_and_scheduler(sharded: Any, rank: int, size: int) -> None:
    """The same with groups of parameters and a learning-rate schedule."""
    with_groups(sharded, rank, size, lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.7))


def follows_a_scheduler_of_betas(rank: int, size: int) -> None:
    """torch's ZeroRedundancyOptimizer cannot: its `defaults` lack what the caller left out."""
    before, after = with_groups(
        ShardedOptimizer,
        rank,
        size,
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=[0.1, 0.05], total_steps=9),
    )
    for group, old in zip(after, before, strict=True):
        assert group["betas"] != old["betas"]


def state_of_the_unsharded(sharded: Any, rank: int, size: int) -> None:
    """`consolidate_state_dict` collects the whole state, which loads anywhere and trains on."""
    ddp, single = miniddp.SimpleDDP(reference(Mlp)), reference(Mlp)
    ours = sharded(groups(ddp), torch.optim.Adam, lr=0.02)
    theirs = torch.optim.Adam(groups(single), lr=0.02)
    train_pair(ddp, ours, single, theirs, rank, size)
    to = size - 1
    ours.consolidate_state_dict(to=to)
    boxes = [None]
    if rank == to:
        state = ours.state_dict()
        expected = theirs.state_dict()
        assert list(state["state"]) == list(expected["state"]) == list(range(6))
        close(state["state"], expected["state"], "state")
        assert [g["params"] for g in state["param_groups"]] == [[0, 1, 2], [3, 4, 5]]
        boxes = [copy.deepcopy(state)]
    elif size > 1:
        with pytest.raises(RuntimeError, match="consolidate_state_dict"):
            ours.state_dict()
    dist.broadcast_object_list(boxes, src=to)
    fresh = sharded(groups(ddp), torch.optim.Adam, lr=7.0)
    fresh.load_state_dict(copy.deepcopy(boxes[0]))
    unsharded = torch.optim.Adam(groups(single), lr=7.0)
    unsharded.load_state_dict(boxes[0])
    assert fresh.param_groups[0]["lr"] == 0.02
    train_pair(ddp, fresh, single, unsharded, rank, size)


def adds_a_group(sharded: Any, rank: int, size: int) -> None:
    """`add_param_group` after construction."""
    ddp, single = miniddp.SimpleDDP(reference(Mlp)), reference(Mlp)
    optimizers = []
    for model, make in ((ddp.module, sharded), (single, None)):
        body = [*model.first.parameters(), *model.second.parameters()]
        optimizer = (
            make(body, torch.optim.Adam, lr=0.02) if make else torch.optim.Adam(body, lr=0.02)
        )
        optimizer.add_param_group({"params": list(model.last.parameters()), "lr": 0.1})
        optimizers.append(optimizer)
    train_pair(ddp, optimizers[0], single, optimizers[1], rank, size)


BOTH = [
    follows_unsharded,
    follows_with_groups_and_scheduler,
    state_of_the_unsharded,
    adds_a_group,
]


def parity_rows(test: Any) -> Any:
    for case in BOTH:
        test = row("sharding", CLOSE, says=case)(test)
    return test


@parity_rows
@pytest.mark.parametrize("implementation", SHARDED)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_sharded_optimizer(size: int, implementation: str) -> None:
    run(run_cases, size, BOTH, SHARDED[implementation], timeout=120)


def holds_its_part_of_the_state(rank: int, size: int) -> None:
    width, layers = 32, 8
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
    count = layers * width * width
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    assert state_bytes(optimizer) == 0
    model(torch.rand(2, width)).sum().backward()
    optimizer.step()
    each = memory.bytes_per_parameter("adam")
    held = all_gather(torch.tensor([float(state_bytes(optimizer))]))
    assert sum(held).item() == each.optimizer * count
    if layers % size == 0:
        predicted = memory.memory_per_rank(count, size, 1, each)
        assert state_bytes(optimizer) == predicted.optimizer
    assert state_bytes(optimizer) <= each.optimizer * (count / size + width * width)


def loads_only_its_part_of_the_state(rank: int, size: int) -> None:
    single = reference(Mlp)
    unsharded = torch.optim.Adam(single.parameters(), lr=0.1)
    backward(single, *joined(0, 1))
    unsharded.step()
    optimizer = ShardedOptimizer(reference(Mlp).parameters(), torch.optim.Adam, lr=0.1)
    optimizer.load_state_dict(unsharded.state_dict())
    held = all_gather(torch.tensor([float(state_bytes(optimizer))]))
    assert sum(held).item() == state_bytes(unsharded)
    assert size == 1 or state_bytes(optimizer) < state_bytes(unsharded)


class CountingSGD(torch.optim.SGD):
    """Keeps an option that a step changes, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


def keeps_options_that_a_step_changes(rank: int, size: int) -> None:
    optimizer = ShardedOptimizer(nn.Linear(2, 1).parameters(), CountingSGD, lr=0.1)
    for _ in range(3):
        optimizer.step()
    assert optimizer.param_groups[0]["count"] == 3


def without_sending_the_replicas_differ(rank: int, size: int) -> None:
    model = reference(Mlp)
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    optimizer._broadcast_parameters = lambda: None
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    if size > 1:
        with pytest.raises(ValueError, match="replicas differ"):
            miniddp.SimpleDDP(model)


def uses_a_closure(rank: int, size: int) -> None:
    model = nn.Linear(2, 1)
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)

    def closure() -> Tensor:
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).requires_grad


class ScaledSGD(torch.optim.SGD):
    """Wants its closure, and an argument of its own."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor], *, scale: float) -> Tensor:
        loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= scale * loss
        return loss


def passes_on_what_step_gets(rank: int, size: int) -> None:
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = ShardedOptimizer(model.parameters(), ScaledSGD)
    assert optimizer.step(lambda: torch.tensor(2.0), scale=3) == 2
    assert model.weight.tolist() == [[-5, -5]]


def moves_any_layout_and_dtype(rank: int, size: int) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1).bfloat16())
    miniddp.replicate.broadcast_module(model)
    model[0].to(memory_format=torch.channels_last)
    assert not model[0].weight.is_contiguous()
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.5)
    before = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for parameter, old in zip(model.parameters(), before.parameters(), strict=True):
        close(parameter, old - 0.5, "one step")
    assert not model[0].weight.is_contiguous()


class Allocations(TorchDispatchMode):
    """What each operation gives: its device, and the bytes of the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: set[str] = set()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.devices.add(tensor.device.type)
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return result


def collects_part_by_part(rank: int, size: int) -> None:
    """With one buffer of the largest part at a time, not one of all parts as large as it."""
    model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(size)])
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    model(torch.ones(1, 256)).sum().backward()
    optimizer.step()
    part = 2 * 256 * 256 * 4  # bytes: two moments of each weight of one layer
    assert state_bytes(optimizer) == part
    to = size - 1
    with Allocations() as made:
        optimizer.consolidate_state_dict(to=to)
    assert made.largest < 1.1 * part
    if rank == to:
        assert made.largest >= part or size == 1
        moments = [state["exp_avg"] for state in optimizer.state_dict()["state"].values()]
        assert [moment.device.type for moment in moments] == ["cpu"] * size


def forgets_a_collected_state(rank: int, size: int) -> None:
    model = nn.Linear(2, 1)
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    optimizer.consolidate_state_dict()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=f"rank {rank} has only its own part"):
        optimizer.state_dict()


def saves_the_learning_rate_of_now(rank: int, size: int) -> None:
    optimizer = ShardedOptimizer(nn.Linear(2, 1).parameters(), torch.optim.SGD, lr=0.5)
    optimizer.step()
    optimizer.consolidate_state_dict()
    optimizer.param_groups[0]["lr"] = 0.25
    if rank == 0:
        assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.25


@pytest.mark.parametrize("size", [1, 2, 4])
def test_sharded_optimizer_alone(size: int) -> None:
    cases = [
        follows_a_scheduler_of_betas,
        holds_its_part_of_the_state,
        loads_only_its_part_of_the_state,
        keeps_options_that_a_step_changes,
        without_sending_the_replicas_differ,
        uses_a_closure,
        passes_on_what_step_gets,
        saves_the_learning_rate_of_now,
        moves_any_layout_and_dtype,
        collects_part_by_part,
        forgets_a_collected_state,
    ]
    run(run_cases, size, cases)


def collect_beside_another_backend(rank: int) -> set[str]:
    """In a group whose first backend is not the CPU's, as NCCL may be."""
    init_process_group("meta:fake,cpu:gloo")
    model = nn.Linear(8, 8)
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    with Allocations() as made:
        optimizer.consolidate_state_dict()
    if rank == 0:
        assert len(optimizer.state_dict()["state"]) == 2
    return made.devices


def test_the_collected_state_travels_through_host_memory_where_gloo_is_beside_nccl() -> None:
    devices = run(collect_beside_another_backend, 2, backend=None, default_device=False)
    assert devices == [{"cpu"}, {"cpu"}]


def different_parameters(rank: int) -> None:
    ShardedOptimizer(nn.Linear(2, 2 + rank // 2).parameters(), torch.optim.SGD, lr=0.1)


def test_different_parameters_are_refused_on_every_rank() -> None:
    for message in fails_on_every_rank(3, different_parameters):
        assert message.startswith("ValueError: replicas differ: parameter '0.0' ((2, 2) ")
        assert message.endswith(" on rank 2")


def test_without_a_process_group() -> None:
    with pytest.raises(RuntimeError, match="there is no process group"):
        ShardedOptimizer(nn.Linear(1, 1).parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(RuntimeError, match="there is no process group"):
        FullyShardedModule(nn.Linear(1, 1))


# The sharded module


def per_layer(model: nn.Module, **options: Any) -> FullyShardedModule:
    """Each direct child a unit, then the whole."""
    units = {child: FullyShardedModule(child, **options) for child in model.children()}
    for name, child in list(model._modules.items()):
        setattr(model, name, units[child])
    return FullyShardedModule(model, **options)


def whole(model: nn.Module, **options: Any) -> FullyShardedModule:
    return FullyShardedModule(model, **options)


def full_gradients(model: FullyShardedModule) -> dict[str, Tensor]:
    """Gradients by their names before the wrapping: load them as if they were parameters."""
    with torch.no_grad():
        shards = [p for p in model.parameters() if p.grad is not None]
        values = [p.detach().clone() for p in shards]
        for shard in shards:
            shard.copy_(shard.grad)
        gathered = model.full_state_dict()
        for shard, value in zip(shards, values, strict=True):
            shard.copy_(value)
    return gathered


class Recurrent(nn.Module):
    """A layer that keeps a list of its weights besides its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 6, num_layers=2, batch_first=True)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(x[:, None])[0][:, 0])


class Buffered(nn.Module):
    """Buffers, one of them not saved, a scalar parameter, and one module in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(()))
        self.first = nn.Linear(5, 8)
        self.twice = nn.Linear(8, 8)
        self.again = self.twice
        self.last = nn.Linear(8, 3)
        self.register_buffer("shift", torch.rand(5))
        self.register_buffer("factor", torch.rand(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first((x + self.shift) * self.factor * self.scale))
        return self.last(self.again(torch.tanh(self.twice(hidden))))


def compare(
    model: FullyShardedModule, single: nn.Module, rank: int, size: int, steps: int = STEPS
) -> None:
    ours = torch.optim.AdamW(model.parameters(), lr=0.05)
    theirs = torch.optim.AdamW(single.parameters(), lr=0.05)
    for step in range(steps):
        batch = joined(step, size)
        own = part(rank, size, *batch)
        if size > 1:
            assert not torch.equal(own[0], batch[0].chunk(size)[rank - 1])
        backward(model, *own)
        backward(single, *batch)
        expected = dict(single.named_parameters(remove_duplicate=False))
        gradients = full_gradients(model)
        for name, parameter in expected.items():
            close(gradients[name], parameter.grad, f"step {step}, gradient of {name}")
        before = {name: parameter.detach().clone() for name, parameter in expected.items()}
        ours.step()
        theirs.step()
        state = model.full_state_dict()
        assert state.keys() == single.state_dict().keys()
        for name, value in single.state_dict().items():
            close(state[name], value, f"step {step}, {name}")
            if name in before:
                assert not torch.equal(state[name], before[name]), f"step {step}: {name} still"
        with torch.no_grad():
            close(model(batch[0]), single(batch[0]), f"step {step}, output")
        ours.zero_grad()
        theirs.zero_grad()


def follows_one_process(rank: int, size: int) -> None:
    for build in (Mlp, Buffered, Recurrent):
        for wrap in (whole, per_layer):
            for reshard in (True, False):
                model = wrap(seeded(build, rank), reshard_after_forward=reshard)
                try:
                    compare(model, reference(build), rank, size, steps=3)
                except AssertionError as error:
                    where = f"{build.__name__}, {wrap.__name__}, {reshard}"
                    raise AssertionError(f"{where}: {error}") from error


def tied_within_a_unit(rank: int, size: int) -> None:
    torch.manual_seed(rank)
    model, single = FullyShardedModule(seeded(Tied, rank)), reference(Tied)
    assert sum(p.numel() for p in model.parameters()) * size < 11 * 8 + 8 * 8 + 8 + size
    ours = torch.optim.SGD(model.parameters(), lr=0.5)
    theirs = torch.optim.SGD(single.parameters(), lr=0.5)
    for step in range(3):
        generator = torch.Generator(device()).manual_seed(step)
        tokens = torch.randint(11, (4 * size, 3), generator=generator)
        for network, batch in ((model, tokens.chunk(size)[rank]), (single, tokens)):
            nn.functional.cross_entropy(network(batch).flatten(0, 1), batch.flatten()).backward()
        ours.step()
        theirs.step()
        close(model.full_state_dict(), dict(single.state_dict()), f"step {step}")
        ours.zero_grad()
        theirs.zero_grad()


def accumulates(rank: int, size: int) -> None:
    """Two forwards, then their backwards in the other order; gradients add up."""
    model, single = per_layer(seeded(Mlp, rank)), reference(Mlp)
    batches = [joined(step, size)[0] for step in range(2)]
    losses = [model(x.chunk(size)[rank]).square().mean() for x in batches]
    for loss in reversed(losses):
        loss.backward()
    sum(single(x).square().mean() for x in batches).backward()
    gradients = full_gradients(model)
    for name, parameter in single.named_parameters():
        close(gradients[name], parameter.grad, name)


def frozen_unit(rank: int, size: int) -> None:
    model, single = seeded(Mlp, rank), reference(Mlp)
    for network in (model, single):
        network.second.requires_grad_(False)
    sharded = per_layer(model)
    x = joined(0, size)[0]
    sharded(x.chunk(size)[rank]).square().mean().backward()
    single(x).square().mean().backward()
    assert sharded.module.second.shard.grad is None
    gradients = full_gradients(sharded)
    for name, parameter in single.named_parameters():
        if parameter.requires_grad:
            close(gradients[name], parameter.grad, name)


def loads_what_others_saved(rank: int, size: int) -> None:
    """The full state is that of any number of ranks, and of one process."""
    single = seeded(Buffered, 99)
    before = seeded(Buffered, rank)
    before.load_state_dict(single.state_dict())
    model = per_layer(before)
    single.load_state_dict(reference(Buffered).state_dict())
    x = joined(0, size)[0]
    with torch.no_grad():
        assert not torch.allclose(model(x), single(x))
    saved = model.full_state_dict()
    single.load_state_dict(saved)
    close(saved, dict(seeded(Buffered, 99).state_dict()), "state")
    with torch.no_grad():
        single.factor.copy_(model.module.factor)  # not saved
        close(model(x), single(x), "output")


class Views(nn.Module):
    """Buffers that are views: of every other column, transposed, and one number three times."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.whole = torch.full((3, 4), value)
        self.register_buffer("columns", self.whole[:, ::2])
        self.register_buffer("turned", torch.full((2, 3), value).t())
        self.register_buffer("expanded", torch.full((1,), value).expand(3))


def buffers_of_any_strides_start_as_rank_0s(rank: int, size: int) -> None:
    views = Views(float(rank + 1))
    FullyShardedModule(views)
    for name, buffer in views.named_buffers():
        assert torch.equal(buffer, torch.ones_like(buffer)), name
    assert torch.equal(views.whole[:, 1::2], torch.full((3, 2), float(rank + 1)))


def an_infinite_gradient_on_one_rank(rank: int, size: int) -> None:
    """torch's `ShardedGradScaler` skips the step on all ranks; a plain one only on this."""
    for scaler_class, skipping in ((torch.amp.GradScaler, [0]), (ShardedGradScaler, range(size))):
        scaler = scaler_class(device().type, init_scale=4.0)
        model = FullyShardedModule(nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        before = model.shard.detach().clone()
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        if rank == 0:
            model.shard.grad[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(model.shard, before) == (rank in skipping)
        assert scaler.get_scale() == (2.0 if rank in skipping else 4.0)


def equals_torch(rank: int, size: int) -> None:
    """A fully sharded module learns what `torch.distributed.fsdp.fully_shard` learns."""
    where = torch.device("cpu") if dist.get_backend() == "gloo" else device()  # gloo gathers there
    model, theirs = per_layer(seeded(Mlp, rank)), reference(Mlp).to(where)
    mesh = dist.device_mesh.init_device_mesh(where.type, (size,))
    for layer in theirs.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(theirs, mesh=mesh)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.05) for m in (model, theirs)]
    for step in range(STEPS):
        batch = part(rank, size, *joined(step, size))
        backward(model, *batch)
        backward(theirs, *(tensor.to(where) for tensor in batch))
        gradients = full_gradients(model)
        for name, parameter in theirs.named_parameters():
            of_theirs = parameter.grad.full_tensor()
            close(gradients[name].to(where), of_theirs, f"step {step}, gradient of {name}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        state = model.full_state_dict()
        for name, parameter in theirs.named_parameters():
            close(state[name].to(where), parameter.full_tensor(), f"step {step}, {name}")


def clips_by_the_norm_of_all(rank: int, size: int) -> None:
    """`clip_grad_norm_` of the module: the norm, and the step, of one process."""
    for build, wrap in ((Mlp, whole), (Mlp, per_layer), (Buffered, per_layer), (Layers, per_layer)):
        for norm_type in (2, 2.0, 1, 3, math.inf):
            for max_norm in (0.05, 1e6):
                model, single = wrap(seeded(build, rank)), reference(build)
                batch = joined(0, size)
                backward(model, *part(rank, size, *batch))
                backward(single, *batch)
                before = [p.grad.clone() for p in single.parameters()]
                norm = model.clip_grad_norm_(max_norm, norm_type)
                expected = nn.utils.clip_grad_norm_(single.parameters(), max_norm, norm_type)
                what = f"{build.__name__}, {wrap.__name__}, {norm_type}, {max_norm}"
                close(norm, expected, f"{what}, the norm")
                clipped = any(
                    not torch.equal(p.grad, old)
                    for p, old in zip(single.parameters(), before, strict=True)
                )
                assert clipped == (max_norm < 1)
                gradients = full_gradients(model)
                for name, parameter in single.named_parameters():
                    close(gradients[name], parameter.grad, f"{what}, {name}")


class Layers(nn.Module):
    """Its outer unit has no parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def clips_what_there_is(rank: int, size: int) -> None:
    """Without any gradient, with one unit frozen, and in float64."""
    model = per_sequence(nn.Linear(4, 4), nn.Linear(4, 4))
    assert model.clip_grad_norm_(1.0) == 0
    model.module[0].requires_grad_(False)
    model(torch.ones(1, 4)).sum().backward()
    assert model.clip_grad_norm_(1e-3) > 1e-3
    after = torch.stack(all_gather(model.module[1].shard.grad.as_subclass(Tensor)))
    close(after.norm(), torch.tensor(1e-3), "the norm afterwards")
    double = FullyShardedModule(nn.Linear(4, 4).double())
    double(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    assert double.clip_grad_norm_(1.0).dtype == torch.float64
    with pytest.raises(ValueError, match="norm_type must be positive, not -1"):
        model.clip_grad_norm_(1.0, -1)


def per_sequence(*layers: nn.Module) -> FullyShardedModule:
    return FullyShardedModule(nn.Sequential(*[FullyShardedModule(layer) for layer in layers]))


def norms_of_one_rank(shards: list[nn.Parameter]) -> Iterator[Callable[[], Any]]:
    """What programs do to clip, or to print, without knowing of the shards."""
    yield lambda: nn.utils.clip_grad_norm_(shards, 1.0)
    yield lambda: nn.utils.clip_grad_norm_(shards, 1.0, norm_type=math.inf, foreach=False)
    yield lambda: nn.utils.get_total_norm([p.grad for p in shards])
    yield lambda: sum(p.grad.norm(2) ** 2 for p in shards) ** 0.5
    yield lambda: torch.stack([torch.norm(p.grad) for p in shards]).norm()
    yield lambda: torch.linalg.vector_norm(shards[0].grad)


def refuses_the_norm_of_a_shard(rank: int, size: int) -> None:
    model = per_sequence(nn.Linear(4, 4), nn.Linear(4, 4))
    shards = list(model.parameters())
    for _ in range(2):  # also of gradients that two backward passes have added up
        model(torch.ones(1, 4)).sum().backward()
        for norm in norms_of_one_rank(shards):
            with pytest.raises(RuntimeError, match=r"one rank's shard, so .* call clip_grad_norm_"):
                norm()


def trains_as_other_gradients_do(rank: int, size: int) -> None:
    """What refuses a norm takes every step of an optimizer, and leaves no trace in its state."""
    optimizers: list[tuple[Any, dict[str, Any]]] = [
        (torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "foreach": False}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.RMSprop, {"momentum": 0.5}),
        (torch.optim.NAdam, {}),
        (torch.optim.Rprop, {}),
    ]
    for optimizer_class, options in optimizers:
        model, single = per_layer(seeded(Mlp, rank)), reference(Mlp)
        ours = optimizer_class(model.parameters(), lr=0.01, **options)
        theirs = optimizer_class(single.parameters(), lr=0.01, **options)
        for step in range(3):
            batch = joined(step, size)
            ours.zero_grad(set_to_none=step > 1)
            theirs.zero_grad(set_to_none=step > 1)
            backward(model, *part(rank, size, *batch))
            backward(single, *batch)
            ours.step()
            theirs.step()
        close(model.full_state_dict(), dict(single.state_dict()), optimizer_class.__name__)
        for state in ours.state.values():
            for value in state.values():
                assert type(value) in (Tensor, float, int)
        copy.deepcopy(model)


class OfItsOwnType(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(next(self.parameters()).dtype))


def reads_its_parameters_in_forward(rank: int, size: int) -> None:
    model = FullyShardedModule(OfItsOwnType(3, 2))
    output = model(torch.ones(1, 3, dtype=torch.float64))
    assert output.dtype == torch.float32
    output.sum().backward()
    assert [name for name, _ in model.named_parameters()] == ["shard"]


@row("sharding", CLOSE, says=equals_torch)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_fully_sharded_module(size: int) -> None:
    cases = [
        follows_one_process,
        tied_within_a_unit,
        accumulates,
        frozen_unit,
        loads_what_others_saved,
        buffers_of_any_strides_start_as_rank_0s,
        an_infinite_gradient_on_one_rank,
        reads_its_parameters_in_forward,
        clips_by_the_norm_of_all,
        clips_what_there_is,
        refuses_the_norm_of_a_shard,
        trains_as_other_gradients_do,
        equals_torch,
    ]
    run(run_cases, size, cases, timeout=150)


# Memory and traffic of the sharded module


class Gathered:
    """Watches the storages of what a module gathers; a freed storage counts no more."""

    def __init__(self, model: FullyShardedModule) -> None:
        self.storages: list[tuple[StorageWeakRef, int]] = []
        for unit in model.modules():
            if isinstance(unit, FullyShardedModule):
                unit.gather = self.watch(unit.gather)

    def watch(self, gather: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def watched() -> Tensor:
            whole = gather()
            self.storages.append((StorageWeakRef(whole.untyped_storage()), whole.nbytes))
            return whole

        return watched

    def live(self) -> int:
        return sum(size for storage, size in self.storages if not storage.expired())


def wide_layers(options: dict[str, Any]) -> tuple[FullyShardedModule, int]:
    """Four equal layers of so many bytes each."""
    layers = [nn.Linear(24, 24) for _ in range(4)]
    size = nbytes(layers[0].parameters())
    return per_layer(nn.Sequential(*layers), **options), size


def watch_peak(model: FullyShardedModule, gathered: Gathered, step: Callable[[], None]) -> int:
    """The most bytes gathered at once, seen whenever a layer has just run or gives a gradient."""
    seen = [0]

    def look(*_: Any) -> None:
        seen.append(gathered.live())

    handles = []
    for unit in model.module:
        handles.append(unit.module.register_forward_hook(look))
        handles.append(unit.module.register_full_backward_hook(look))
    step()
    for handle in handles:
        handle.remove()
    return max(seen)


def drops_what_it_gathers(rank: int, size: int) -> None:
    x = torch.rand(3, 24, requires_grad=True)
    for reshard, kept, peak_layers in ((True, 0, 1), (False, 4, 4)):
        model, layer = wide_layers({"reshard_after_forward": reshard})
        gathered = Gathered(model)
        losses = []
        peak = watch_peak(model, gathered, lambda m=model, k=losses: k.append(m(x).sum()))
        assert peak == peak_layers * layer
        assert gathered.live() == kept * layer
        peak = watch_peak(model, gathered, losses.pop().backward)
        assert peak <= max(peak_layers, 2) * layer
        assert gathered.live() == 0
        assert len(gathered.storages) == (8 if reshard else 4)


def checkpoint_drops_it_too(rank: int, size: int) -> None:
    model, _ = wide_layers({"reshard_after_forward": False})
    reference_model = copy.deepcopy(nn.Sequential(*[nn.Linear(24, 24) for _ in range(4)]))
    reference_model.load_state_dict(model.full_state_dict())
    gathered = Gathered(model)
    x = torch.rand(3, 24)
    y = x
    for unit in model.module:
        y = checkpoint(unit, y, use_reentrant=False)
    assert gathered.live() == 0
    y.sum().backward()
    assert gathered.live() == 0
    reference_model(x).sum().backward()
    own = [parameter.grad for parameter in reference_model.parameters()]
    for gradient in own:
        dist.all_reduce(gradient)
        gradient /= size
    for gradient, expected in zip(full_gradients(model).values(), own, strict=True):
        close(gradient, expected, "gradient")


def keeps_one_nth(rank: int, size: int) -> None:
    """Bytes between steps: parameters, gradients and Adam's state, as the cost model says."""
    model, layer = wide_layers({})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.rand(3, 24)).sum().backward()
    optimizer.step()
    gc.collect()
    shards = list(model.parameters())
    measured = memory.Memory(nbytes(shards), nbytes(p.grad for p in shards), state_bytes(optimizer))
    count = 4 * layer // 4  # four layers of 4-byte elements
    assert layer % (4 * size) == 0
    assert measured == memory.memory_per_rank(count, size, 3, memory.bytes_per_parameter("adam"))
    for tensor in [*shards, *(p.grad for p in shards)]:
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    for layer_unit in model.module:
        assert layer_unit.module.weight is None
        assert layer_unit.module.bias is None


@contextmanager
def counting_bytes() -> Iterator[list[int]]:
    sent: list[int] = []

    def counted(collective: Callable[..., int]) -> Callable[..., int]:
        def call(*args: Any) -> int:
            sent.append(collective(*args))
            return sent[-1]

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather", "reduce_scatter"):
            patch.setattr(ring, name, counted(getattr(ring, name)))
        yield sent


def sends_what_the_model_says(rank: int, size: int) -> None:
    for reshard, stage in ((True, 3), (False, 2)):
        model, layer = wide_layers({"reshard_after_forward": reshard})
        with counting_bytes() as sent:
            model(torch.rand(3, 24, requires_grad=True)).sum().backward()
        expected = 4 * memory.communication_elements(4 * layer // 4, size, stage)
        assert sum(sent) == expected


@pytest.mark.parametrize("size", [1, 2, 4])
def test_memory_and_traffic(size: int) -> None:
    cases = [
        drops_what_it_gathers,
        checkpoint_drops_it_too,
        keeps_one_nth,
        sends_what_the_model_says,
    ]
    run(run_cases, size, cases)


# Bad input


def tied_across_units(rank: int) -> None:
    model = Tied()
    model.embed = FullyShardedModule(model.embed)
    FullyShardedModule(model)


def tied_across_siblings(rank: int) -> None:
    model = Tied()
    model.embed = FullyShardedModule(model.embed)
    model.head = FullyShardedModule(model.head)


def mixed_dtypes(rank: int) -> None:
    FullyShardedModule(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()))


def partly_frozen(rank: int) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].bias.requires_grad_(False)
    FullyShardedModule(model)


def wrapped_elsewhere(rank: int) -> None:
    layer = nn.Linear(2, 2)
    units = [FullyShardedModule(layer) for _ in range(2)]
    assert not units


def wrapped_in_one_of_two_places(rank: int) -> None:
    model = Buffered()
    model.twice = FullyShardedModule(model.twice)
    FullyShardedModule(model)


def nothing_to_shard(rank: int) -> None:
    FullyShardedModule(nn.Tanh())


def different_modules(rank: int) -> None:
    FullyShardedModule(nn.Linear(2, 2 + rank))


def step_before_backward(rank: int) -> None:
    model = FullyShardedModule(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    loss = model(torch.rand(1, 2)).sum()
    for shard in model.parameters():
        shard.grad = torch.ones_like(shard)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    loss.backward()


def raises_in_forward(rank: int) -> None:
    """The parameters are put away all the same."""
    model = FullyShardedModule(nn.Linear(2, 2))
    try:
        model(torch.rand(1, 3))
    finally:
        assert model.module.weight is None


MISTAKES = {
    tied_across_units: "ValueError: parameter 'head.weight' is tied to one that is in another unit",
    tied_across_siblings: "ValueError: parameter 'weight' is tied to one that is in another unit",
    mixed_dtypes: "ValueError: parameter '1.weight' has dtype=torch.float64, the unit's first has",
    partly_frozen: "ValueError: parameter '1.bias' has requires_grad=False, the unit's first has",
    nothing_to_shard: "ValueError: Tanh has no parameter",
    wrapped_elsewhere: "ValueError: Linear '' is in another unit already",
    wrapped_in_one_of_two_places: "ValueError: Linear 'again' is in another unit already",
    different_modules: "ValueError: replicas differ: parameter 'weight' ((2, 2) ",
    step_before_backward: "RuntimeError: the parameters of a FullyShardedModule changed between",
    raises_in_forward: "RuntimeError: mat1 and mat2 shapes cannot be multiplied",
}


def all_messages(rank: int) -> list[str]:
    return [message_of(rank, mistake) for mistake in MISTAKES]


def test_every_mistake_gets_its_message_on_every_rank() -> None:
    for messages in run(all_messages, 2):
        for message, expected in zip(messages, MISTAKES.values(), strict=True):
            assert message.startswith(expected)
            assert "\n" not in message
