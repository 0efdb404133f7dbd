"""Programs as other people write them: the mean, or an error on every rank with what to do."""

import warnings
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.utils.checkpoint import checkpoint

import miniddp
from miniddp import hooks
from miniddp.process import device

from . import ddp_cases
from .ddp_cases import CLOSE, Mlp, assert_equal_on_all_ranks, reference, seeded
from .ranks import run

DDP = miniddp.DistributedDataParallel
VIEWS = pytest.mark.parametrize("views", [False, True])


def on_ranks(fn: Callable[..., Any], *args: Any, world_size: int = 2) -> list[Any]:
    return list(run(quietly, world_size, fn, *args, timeout=30))


def quietly(rank: int, fn: Callable[..., Any], *args: Any) -> Any:
    warnings.simplefilter("ignore")
    torch.manual_seed(rank)
    return fn(rank, *args)


def errors(fn: Callable[..., Any], *args: Any, world_size: int = 2) -> list[str]:
    """What each rank raises; all must."""
    messages = on_ranks(message_of, fn, *args, world_size=world_size)
    assert all(messages), messages
    return messages


def message_of(rank: int, fn: Callable[..., Any], *args: Any) -> str:
    try:
        fn(rank, *args)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def mean_of(build: Callable[[], nn.Module], inputs: Tensor, loss: Callable[..., Tensor]) -> Any:
    """Gradients of one process: the mean over the ranks' parts of `inputs`."""
    alone = reference(build)
    total = sum(loss(alone, x) for x in inputs)
    (total / len(inputs)).backward()
    return alone


def parts(rank: int, *shape: int) -> Tensor:
    """Inputs for each rank, the same tensor on all: (ranks, *shape)."""
    generator = torch.Generator(device()).manual_seed(5)
    return torch.randn(dist.get_world_size(), *shape, generator=generator)


# Layouts


class Conv(nn.Module):
    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, size, bias=False)
        self.line = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(self.conv(x).mean((2, 3)).tanh())


def channels_last(net: Conv) -> None:
    net.to(memory_format=torch.channels_last)


def transposed(net: Conv) -> None:
    """A matrix stored by columns, as `load_state_dict(assign=True)` may leave it."""
    weight = net.line.weight.detach().t().contiguous().t()
    net.line.weight = nn.Parameter(weight)


def wrap_with_another_layout(rank: int, change: Callable[[Conv], None], changed: int) -> None:
    net = Conv()
    if rank == changed:
        change(net)
    DDP(net)


@pytest.mark.parametrize("changed", [0, 1])
@pytest.mark.parametrize(
    ("change", "name"), [(channels_last, "conv.weight"), (transposed, "line.weight")]
)
def test_a_layout_of_one_rank_is_refused(
    change: Callable[[Conv], None], name: str, changed: int
) -> None:
    messages = errors(wrap_with_another_layout, change, changed)
    assert len(set(messages)) == 1
    assert f"parameter '{name}'" in messages[0]
    assert "strides (" in messages[0]
    assert "alike on every rank" in messages[0]


def layouts_that_agree(rank: int, kind: str) -> None:
    def build() -> nn.Module:
        net = Conv(1 if kind == "in name" else 3)
        if kind == "on all":
            channels_last(net)
            transposed(net)
        return net

    net = seeded(build, rank)
    if kind == "in name" and rank == 0:  # a 1x1 convolution: other strides, the same memory
        weight = net.conv.weight
        weight.data = weight.data.as_strided(weight.shape, (2, 1, 2, 2))
    ddp = DDP(net)
    if kind == "after wrapping" and rank == 0:
        net.conv.weight.data = net.conv.weight.data.to(memory_format=torch.channels_last)
    inputs = parts(rank, 2, 2, 5, 5)
    alone = mean_of(build, inputs, lambda net, x: net(x).square().mean())
    for step in range(3):  # the buckets are built anew before the second
        ddp.zero_grad()
        ddp(inputs[rank]).square().mean().backward()
        ddp_cases.assert_same(ddp.module, alone, f"{kind}, step {step}")


@pytest.mark.parametrize("kind", ["in name", "on all", "after wrapping"])
def test_layouts_that_agree_give_the_mean(kind: str) -> None:
    on_ranks(layouts_that_agree, kind)


# Hooks of users


def clamp(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.01, 0.01)


def hooked(rank: int, when: str, views: bool) -> None:
    """Each rank limits its own gradient; then the limited ones are averaged."""
    module = seeded(Mlp, rank)

    def add_hooks() -> None:
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(clamp)

    if when == "before":
        add_hooks()
    ddp = DDP(module, gradient_as_bucket_view=views, bucket_cap_mb=0.0005)
    if when == "after":
        add_hooks()
    inputs = parts(rank, 6, 5) * 3
    for _ in range(3):
        ddp.zero_grad()
        ddp(inputs[rank]).square().mean().backward()
    expected = [torch.zeros_like(p) for p in module.parameters()]
    for x in inputs:
        alone = reference(Mlp)
        alone(x).square().mean().backward()
        for total, parameter in zip(expected, alone.parameters(), strict=True):
            total += parameter.grad.clamp(-0.01, 0.01) / len(inputs)
    for parameter, mean in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, mean, **CLOSE)


@VIEWS
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_hook_sees_the_gradient_before_it_is_sent(when: str, views: bool) -> None:
    on_ranks(hooked, when, views)


def step_inside_backward(rank: int, when: str) -> None:
    """As in the tutorial on optimizers inside backward: the gradient is used up by the hook."""

    def step(parameter: Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    module = seeded(Mlp, rank)
    alone = reference(Mlp)
    for parameter in [*alone.parameters(), *(module.parameters() if when == "before" else ())]:
        parameter.register_post_accumulate_grad_hook(step)
    ddp = DDP(module)
    if when == "after":
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(step)
    inputs = parts(rank, 6, 5)
    for _ in range(3):
        ddp(inputs[rank]).square().mean().backward()
        alone(inputs[rank]).square().mean().backward()
    for parameter, own in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(parameter, own)
        assert not parameter.grad.any(), "no old mean may pile up"


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_hook_that_uses_the_gradient_up(when: str) -> None:
    on_ranks(step_inside_backward, when)


def use_up_others(rank: int, options: dict[str, Any]) -> None:
    """As LOMO's hook: it takes the gradients that came before its own."""
    module = seeded(Mlp, rank)
    ddp = DDP(module, **options)
    last = module.second.bias
    module.first.weight.register_hook(lambda _: setattr(last, "grad", None))
    for _ in range(2):
        ddp.zero_grad()
        ddp(torch.randn(2, 5)).sum().backward()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"check_reduction": True},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True},
    ],
)
def test_a_hook_that_uses_up_other_gradients(options: dict[str, Any]) -> None:
    for message in errors(use_up_others, options):
        assert "gradient of 'second.bias' was there and is gone" in message


# Wrappers that share a parameter


class Twice(nn.Module):
    """A wrapper and another one, over the same layer."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x * 2)


def two_wrappers(rank: int, kind: str, views: bool) -> None:
    module = seeded(Mlp, rank)
    first = DDP(module, gradient_as_bucket_view=views)
    second = DDP(module if kind == "beside" else first, gradient_as_bucket_view=views)
    model = Twice(first, second) if kind == "beside" else second
    inputs = parts(rank, 6, 5)
    for _ in range(2):
        model.zero_grad()
        model(inputs[rank]).square().mean().backward()

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        output = net(x) + net(x * 2) if kind == "beside" else net(x)
        return output.square().mean()

    ddp_cases.assert_same(module, mean_of(Mlp, inputs, loss), kind)


@pytest.mark.parametrize("kind", ["beside", "around"])
def test_two_wrappers_of_one_module(kind: str) -> None:
    on_ranks(two_wrappers, kind, False)
    for message in errors(two_wrappers, kind, True):
        assert (
            "gradient of 'module." in message
            or "gradient of 'first." in message
            or ("gradient of 'last." in message or "gradient of 'second." in message)
        )
        assert "another wrapper has the same parameter" in message


# Several backward passes


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 4)
        self.one = nn.Linear(4, 1)
        self.two = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x).tanh()
        return self.one(hidden), self.two(hidden)


def loss_per_head(rank: int, options: dict[str, Any]) -> None:
    ddp = DDP(TwoHeads(), **options)
    one, two = ddp(torch.randn(3, 5))
    one.sum().backward(retain_graph=True)
    two.sum().backward()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"'body.\w+' got its gradient twice after one forward, in two backward passes"),
        ({"find_unused_parameters": True}, "averaged already"),
        ({"check_reduction": True}, "got no gradient in this backward pass"),
        ({"find_unused_parameters": True, "check_reduction": True}, "averaged already"),
    ],
)
def test_a_backward_for_each_head(options: dict[str, Any], message: str) -> None:
    import re

    for seen in errors(loss_per_head, options):
        assert re.search(message, seen), seen


def same_loss_twice(rank: int, output: Callable[[Tensor], Any], options: dict[str, Any]) -> None:
    class Net(Mlp):
        def forward(self, x: Tensor) -> Any:
            return output(super().forward(x))

    ddp = DDP(Net(), **options)
    for _ in range(2):
        ddp.zero_grad()
        loss = first_tensor(ddp(torch.randn(2, 5))).sum()
        loss.backward(retain_graph=True)
        assert_equal_on_all_ranks(ddp)
    loss.backward()


@dataclass
class Answer:
    logits: Tensor


class Named(OrderedDict[str, Any]):
    """A dictionary with attributes, as many libraries have one."""


class Pair(list[Any]):
    pass


OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda y: y,
    "dict": lambda y: {"out": y},
    "mapping": lambda y: UserDict(out=y),
    "dict subclass": lambda y: Named(out=y),
    "list subclass": lambda y: Pair([y]),
    "dataclass": Answer,
    "nested": lambda y: [{"deep": Named(out=(y, "text", None))}],
}


def first_tensor(value: Any) -> Tensor:
    while not isinstance(value, Tensor):
        if isinstance(value, Answer | Cached):
            value = value.logits
        elif isinstance(value, dict | UserDict):
            value = next(iter(value.values()))
        else:
            value = value[0]
    return value


@pytest.mark.parametrize("kind", OUTPUTS)
def test_the_same_loss_twice(kind: str) -> None:
    for options in ({}, {"find_unused_parameters": True}):
        for message in errors(same_loss_twice, OUTPUTS[kind], options):
            assert "averaged already" in message


def backwards_that_are_right(rank: int) -> None:
    """None of these averages twice, so none may raise."""
    ddp = DDP(seeded(Mlp, rank))
    x = torch.randn(3, 5, requires_grad=True)
    loss = ddp(x).square().mean()
    loss.backward(retain_graph=True)
    means = [p.grad.clone() for p in ddp.parameters()]
    torch.autograd.grad(loss, x)  # a saliency map, afterwards
    for parameter, mean in zip(ddp.parameters(), means, strict=True):
        assert torch.equal(parameter.grad, mean)
    first = ddp(x)
    second = ddp(x + 1)
    (first.sum() + second.sum()).backward()  # a loss of two forward passes
    assert_equal_on_all_ranks(ddp)
    with ddp.no_sync():
        loss = ddp(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    ddp.zero_grad()
    hidden = ddp(x)
    hidden.sum().backward(retain_graph=True)
    hidden = ddp(x) + hidden  # the graph of the step before
    ddp.zero_grad()
    hidden.sum().backward()
    assert_equal_on_all_ranks(ddp)


def test_backwards_that_are_right() -> None:
    on_ranks(backwards_that_are_right)


class Checkpointed(nn.Module):
    """A layer that runs twice, each time in a checkpoint; perhaps another one before it."""

    def __init__(self, before: bool, reentrant: bool) -> None:
        super().__init__()
        self.before = nn.Linear(5, 5) if before else nn.Identity()
        self.twice = nn.Linear(5, 5)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x).requires_grad_()
        for _ in range(2):
            x = x + checkpoint(self.twice, x.tanh(), use_reentrant=self.reentrant)
        return x


def checkpointed(rank: int, before: bool, use_reentrant: bool) -> None:
    def build() -> nn.Module:
        return Checkpointed(before, use_reentrant)

    ddp = DDP(seeded(build, rank))
    inputs = parts(rank, 3, 5)
    ddp(inputs[rank].clone()).square().mean().backward()
    alone = mean_of(build, inputs.clone(), lambda net, x: net(x).square().mean())
    ddp_cases.assert_same(ddp.module, alone, "checkpointed")


@pytest.mark.parametrize("before", [False, True])
def test_a_layer_that_runs_twice_in_a_checkpoint(before: bool) -> None:
    on_ranks(checkpointed, before, False)
    for message in errors(checkpointed, before, True):
        assert "'twice." in message
        assert "use_reentrant=False" in message


# What forward returns


class HeadsOfKind(nn.Module):
    def __init__(self, output: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.output = output
        self.body = nn.Linear(5, 4)
        self.head = nn.Linear(4, 2)
        self.other = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        return self.output(self.head(self.body(x).tanh()))


def unused_with_output(rank: int, kind: str) -> None:
    def build() -> nn.Module:
        return HeadsOfKind(OUTPUTS[kind])

    ddp = DDP(seeded(build, rank), find_unused_parameters=True)
    inputs = parts(rank, 3, 5)
    for _ in range(3):
        ddp.zero_grad()
        first_tensor(ddp(inputs[rank])).square().mean().backward()
    alone = mean_of(build, inputs, lambda net, x: first_tensor(net(x)).square().mean())
    ddp_cases.assert_same(ddp.module, alone, kind)
    assert ddp.module.other.weight.grad is None


@pytest.mark.parametrize("kind", OUTPUTS)
def test_unused_parameters_behind_any_output(kind: str) -> None:
    on_ranks(unused_with_output, kind)


def parameter_returned(rank: int) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(5, 1)
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.line(x), self.scale

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        y, scale = net(x)
        return (y * scale).square().mean()

    ddp = DDP(seeded(Net, rank), find_unused_parameters=True)
    inputs = parts(rank, 3, 5)
    loss(ddp, inputs[rank]).backward()
    ddp_cases.assert_same(ddp.module, mean_of(Net, inputs, loss), "returned")


def test_a_parameter_that_forward_returns() -> None:
    on_ranks(parameter_returned)


def left_out_of_the_loss(rank: int) -> None:
    class Net(TwoHeads):
        def forward(self, x: Tensor) -> Any:
            return Named(outputs=super().forward(x))  # pytree does not know the class

    ddp = DDP(Net(), find_unused_parameters=True)
    for _ in range(2):
        ddp(torch.randn(3, 5))["outputs"][0].sum().backward()


def test_the_cure_is_not_the_option_that_is_set() -> None:
    for message in errors(left_out_of_the_loss):
        assert "two.weight, two.bias" in message
        assert "the loss does not use them" in message
        assert "passing the keyword argument" not in message


class Opaque:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def hidden_in_an_object(rank: int) -> None:
    class Net(Mlp):
        def forward(self, x: Tensor) -> Any:
            return Opaque(super().forward(x))

    ddp = DDP(Net(), find_unused_parameters=True)
    ddp(torch.randn(3, 5)).tensor.sum().backward()


def decay_in_the_loss(rank: int) -> None:
    ddp = DDP(HeadsOfKind(OUTPUTS["tensor"]), find_unused_parameters=True)
    decay = sum(parameter.square().sum() for parameter in ddp.parameters())
    (ddp(torch.randn(3, 5)).sum() + decay).backward()


@pytest.mark.parametrize("fn", [hidden_in_an_object, decay_in_the_loss])
def test_a_parameter_that_the_search_did_not_find(fn: Callable[[int], None]) -> None:
    for message in errors(fn):
        assert "was not found in what forward returned, and yet got a gradient" in message
        assert "lists, tuples, mappings or dataclasses" in message
        assert "re-entrant" not in message


def of_a_checkpoint(rank: int) -> None:
    class Net(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x.requires_grad_(), use_reentrant=True)

    ddp = DDP(Net(), find_unused_parameters=True)
    ddp(torch.randn(3, 5)).sum().backward()


def two_forwards_through_two_branches(rank: int) -> None:
    class Net(TwoHeads):
        def forward(self, x: Tensor, head: str) -> Any:
            return getattr(self, head)(self.body(x))

    ddp = DDP(Net(), find_unused_parameters=True)
    x = torch.randn(3, 5)
    (ddp(x, "one").sum() + ddp(x, "two").sum()).backward()


def test_the_search_looks_once_and_in_what_is_recorded() -> None:
    for message in errors(of_a_checkpoint):
        assert "pass use_reentrant=False to a checkpoint" in message
    for message in errors(two_forwards_through_two_branches):
        assert "call backward after each forward" in message


@dataclass
class Cached:
    logits: Tensor
    cache: Any = field(init=False)


def around_itself(tensor: Tensor) -> Any:
    output = {"output": tensor}
    output["self"] = output  # type: ignore[assignment]
    return output


ODD_OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "a field that is not set": Cached,
    "a cycle": around_itself,
    "a class": lambda tensor: (tensor, Cached),
    "deep": lambda tensor: deep(tensor, 3000),
}


def deep(value: Any, levels: int) -> Any:
    for _ in range(levels):
        value = [value]
    return value


def odd_output(rank: int, kind: str) -> None:
    class Net(Mlp):
        def forward(self, x: Tensor) -> Any:
            return ODD_OUTPUTS[kind](super().forward(x))

    ddp = DDP(seeded(Net, rank))
    inputs = parts(rank, 3, 5)

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        return first_tensor(net(x)).square().mean()

    loss(ddp, inputs[rank]).backward()
    ddp_cases.assert_same(ddp.module, mean_of(Net, inputs, loss), kind)


@pytest.mark.parametrize("kind", ODD_OUTPUTS)
def test_an_output_that_is_no_tree(kind: str) -> None:
    on_ranks(odd_output, kind)


# Kinds of parameters and gradients


def gradients_in_float32(rank: int) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 4).bfloat16())
            self.weight.grad_dtype = torch.float32

        def forward(self, x: Tensor) -> Tensor:
            return (x.bfloat16() @ self.weight).float()

    ddp = DDP(Net())
    ddp(torch.randn(5, 8)).square().mean().backward()


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="this torch has no grad_dtype")
def test_a_gradient_of_another_dtype() -> None:
    for message in errors(gradients_in_float32):
        assert "gradient of 'weight' is torch.float32" in message
        assert "torch.bfloat16" in message


def complex_weights(rank: int, hook: Any, tolerance: dict[str, float]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(12, 9, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return torch.view_as_real(x.to(self.weight.dtype) @ self.weight) - 0.5

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        return net(x).square().mean()

    ddp = DDP(seeded(Net, rank))
    state = None
    if hook is hooks.powerSGD_hook:
        state = hooks.PowerSGDState(None, 9, start_powerSGD_iter=2)  # of full rank: exact
    ddp.register_comm_hook(state, hook)
    inputs = parts(rank, 3, 12)
    for _ in range(3):
        ddp.zero_grad()
        loss(ddp, inputs[rank]).backward()
        alone = mean_of(Net, inputs, loss)
        assert alone.weight.grad.imag.abs().max() > 0.1
        ddp_cases.assert_same(ddp.module, alone, hook.__name__, **tolerance)


@pytest.mark.parametrize(
    ("hook", "tolerance"),
    [
        (hooks.allreduce_hook, CLOSE),
        (hooks.powerSGD_hook, CLOSE),
        (hooks.fp16_compress_hook, ddp_cases.HALF),
    ],
)
def test_hooks_average_complex_weights(hook: Any, tolerance: dict[str, float]) -> None:
    on_ranks(complex_weights, hook, tolerance)


def conjugated(rank: int, part: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 5, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return torch.view_as_real(x.to(self.weight.dtype) @ self.weight.mH) - 0.5

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        return net(x).square().mean()

    ddp = DDP(seeded(Net, rank))
    inputs = parts(rank, 3, 5)
    for _ in range(2):
        ddp.zero_grad(set_to_none=part == "set to none")
        loss(ddp, inputs[rank]).backward()
        ddp_cases.assert_same(ddp.module, mean_of(Net, inputs, loss), part)


@pytest.mark.parametrize("part", ["set to none", "kept"])
def test_a_conjugated_gradient(part: str) -> None:
    on_ranks(conjugated, part)


class Marked(Tensor):
    """A subclass whose operations go through `__torch_function__`."""


def of_a_subclass(rank: int) -> None:
    def build() -> nn.Module:
        module = Mlp()
        weight = module.first.weight.detach().as_subclass(Marked)
        module.first.weight = nn.Parameter(weight)
        return module

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        return net(x).square().mean()

    ddp = DDP(seeded(build, rank))
    inputs = parts(rank, 3, 5)
    loss(ddp, inputs[rank]).backward()
    ddp_cases.assert_same(ddp.module, mean_of(build, inputs, loss), "subclass")


def test_a_parameter_of_a_subclass() -> None:
    on_ranks(of_a_subclass)


def expanded_buffer(rank: int) -> list[float]:
    module = Mlp()
    module.register_buffer("row", torch.arange(4.0).add(rank).expand(3, 4))
    ddp = DDP(module)
    ddp(torch.randn(2, 5)).sum().backward()
    ddp(torch.randn(2, 5))
    return ddp.module.row[1].tolist()


def test_the_only_buffer_is_expanded() -> None:
    assert on_ranks(expanded_buffer) == [[0, 1, 2, 3], [0, 1, 2, 3]]


def buffers_of_their_own(rank: int) -> list[int]:
    module = Mlp()
    module.register_buffer("seen", torch.full((2 + rank,), float(rank)))
    module.register_buffer("graph", torch.eye(2 + rank).to_sparse())
    ddp = DDP(module, broadcast_buffers=False)
    ddp(torch.randn(2, 5)).sum().backward()
    assert_equal_on_all_ranks(ddp)
    return ddp.module.seen.tolist()


def test_buffers_that_nobody_copies_may_differ() -> None:
    assert on_ranks(buffers_of_their_own) == [[0, 0], [1, 1, 1]]


def sparse_and_not_synchronised(rank: int) -> None:
    module = Mlp()
    module.register_buffer("graph", torch.eye(2).to_sparse())
    DDP(module, init_sync=False)(torch.randn(2, 5))


def test_a_sparse_buffer_is_never_left_out_silently() -> None:
    for message in errors(sparse_and_not_synchronised):
        assert "sparse" in message


def lazy(rank: int, init_sync: bool) -> None:
    module = nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(2))
    if rank == 1 and init_sync:
        module(torch.ones(1, 3))
    DDP(module, init_sync=init_sync)


def sparse(rank: int) -> None:
    module = nn.Linear(2, 2)
    module.weight = nn.Parameter(torch.eye(2).to_sparse())
    DDP(module)


def test_what_has_no_elements_is_refused_by_name() -> None:
    for message in errors(lazy, True):
        assert "parameter '0.weight' (of a lazy module, no shape yet)" in message
    for message in errors(lazy, False):
        assert "'0.weight' has no shape yet" in message
        assert "run a forward pass" in message
    for message in errors(sparse):
        assert "'weight' is sparse" in message


BUFFERS: dict[str, Callable[[], Tensor]] = {
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
    "sparse": lambda: torch.eye(2).to_sparse(),
}


def with_a_buffer(rank: int, kind: str) -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("table", BUFFERS[kind]())
    DDP(module)


@pytest.mark.parametrize("kind", BUFFERS)
def test_a_buffer_that_is_not_dense(kind: str) -> None:
    for message in errors(with_a_buffer, kind):
        assert f"ValueError: 'table' is {kind}" in message


def converted_in_part(rank: int, convert: Callable[[Mlp], Any]) -> None:
    ddp = DDP(Mlp())
    convert(ddp.module)
    with torch.autocast("cpu", enabled=False):
        ddp(torch.randn(2, 5)).sum().backward()
        ddp(torch.randn(2, 5))


def last_to_double(module: Mlp) -> None:
    module.last.weight.data = module.last.weight.data.double()
    module.last.bias.data = module.last.bias.data.double()
    module.last.register_forward_pre_hook(lambda _, args: (args[0].double(),))


def test_a_layer_converted_after_wrapping() -> None:
    for message in errors(converted_in_part, last_to_double):
        assert "'last.weight' is torch.float64" in message
        assert "convert the module, then wrap it" in message


def there_and_back(rank: int, which: str) -> None:
    ddp = DDP(Mlp())
    part = ddp if which == "all" else ddp.module.last
    part.double()
    part.float()
    ddp(torch.randn(2, 5)).sum().backward()


@pytest.mark.parametrize("which", ["all", "a layer"])
def test_a_model_converted_and_back_after_wrapping(which: str) -> None:
    """Torch's hooks are gone as well, and each rank trains alone, silently."""
    for message in errors(there_and_back, which):
        assert f"'{'first' if which == 'all' else 'last'}.weight' was converted" in message
        assert "convert the module, then wrap it" in message


def in_inference_mode(rank: int) -> None:
    with torch.inference_mode():
        DDP(Mlp())


def test_a_model_wrapped_in_inference_mode() -> None:
    for message in errors(in_inference_mode):
        assert "wrap it outside" in message


def thawed(rank: int) -> None:
    module = Mlp()
    module.first.requires_grad_(False)
    ddp = DDP(module)
    ddp(torch.randn(2, 5)).sum().backward()
    module.first.requires_grad_(True)
    with torch.no_grad():
        ddp(torch.randn(2, 5))
    ddp(torch.randn(2, 5))


def test_a_layer_unfrozen_after_wrapping() -> None:
    for message in errors(thawed):
        assert "'first.weight' did not require a gradient when it was wrapped" in message
        assert "unfreeze the module, then wrap it" in message


def replaced(rank: int, what: str, options: dict[str, Any]) -> None:
    ddp = DDP(Mlp(), **options)
    ddp(torch.randn(2, 5)).sum().backward()
    if what == "state":
        state = {name: value.clone() for name, value in ddp.module.state_dict().items()}
        ddp.module.load_state_dict(state, assign=True)
    else:
        ddp.module.last = nn.Linear(16, 3)
    ddp(torch.randn(2, 5)).sum().backward()


@pytest.mark.parametrize("what", ["state", "layer"])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}])
def test_a_parameter_replaced_after_wrapping(what: str, options: dict[str, Any]) -> None:
    for message in errors(replaced, what, options):
        assert "is no longer the parameter that was wrapped" in message
        assert ("'last." in message) == (what == "layer")


def exchanged(rank: int, cap_mb: float | None) -> None:
    """A hook that fills one `.grad` with the memory of another one."""
    ddp = DDP(Mlp(), gradient_as_bucket_view=True, bucket_cap_mb=cap_mb)
    first, last = ddp.module.first.bias, ddp.module.second.bias
    for _ in range(3):
        ddp(torch.randn(2, 5)).sum().backward()
        first.grad, last.grad = last.grad, first.grad


@pytest.mark.parametrize("cap_mb", [None, 0])
def test_gradients_that_lie_in_each_others_places(cap_mb: float | None) -> None:
    for message in errors(exchanged, cap_mb):
        assert "bias' is not the expected DDP bucket view" in message
        assert "in another parameter's place" in message


class Keeping(Mlp):
    """Returns a tensor whose graph is older than this step, and lives longer."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.ones(2, requires_grad=True) * 2

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.kept


def an_output_that_is_kept(rank: int) -> None:
    ddp = DDP(Keeping())
    for _ in range(5):
        ddp(torch.randn(2, 5))[0].sum().backward()
    assert len(ddp.module.kept._backward_hooks) == 1


def test_hooks_on_an_output_do_not_pile_up() -> None:
    on_ranks(an_output_that_is_kept)


# torch.func


def through_a_transform(rank: int) -> None:
    """The slope of one rank's loss, by a transform; then a step as always."""
    module = seeded(Mlp, 0)
    ddp = DDP(module)
    x = parts(rank, 6, 5)[rank]
    for _ in range(2):
        slope = torch.func.grad(lambda x: ddp(x).square().mean())(x)
        own = torch.func.grad(lambda x: module(x).square().mean())(x)
        torch.testing.assert_close(slope, own)
        module.zero_grad()
        ddp(x).square().mean().backward()
        assert_equal_on_all_ranks(module)


def test_a_transform_of_the_wrapper() -> None:
    on_ranks(through_a_transform)


# torch.compile


def compiled_wrapper(rank: int) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    module = seeded(Mlp, rank)
    ddp = DDP(module)
    compiled = torch.compile(ddp, backend=backend)
    inputs = parts(rank, 6, 5)
    for _ in range(3):  # buckets are rebuilt before the second
        module.zero_grad()
        compiled(inputs[rank]).square().mean().backward()
    assert len(graphs) == 1, "of the module, and nothing else"
    alone = mean_of(Mlp, inputs, lambda model, x: model(x).square().mean())
    for parameter, other in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, **CLOSE)


def test_the_compiler_sees_the_module_alone() -> None:
    on_ranks(compiled_wrapper)


# Join


def joined(rank: int, how: str) -> None:
    ddp = DDP(Mlp())
    with Join([ddp]) if how == "Join" else ddp.join():
        ddp(torch.randn(2, 5)).sum().backward()


@pytest.mark.parametrize("how", ["Join", "ddp.join"])
def test_join_is_refused(how: str) -> None:
    for message in errors(joined, how):
        assert "has no join" in message
        assert "DistributedSampler" in message


# Gradients that no rank has computed


def untouched(rank: int) -> Iterator[float]:
    module = ddp_cases.TwoPaths()
    ddp = DDP(module, find_unused_parameters=True)
    module.right.weight.grad = torch.full_like(module.right.weight, float(rank))
    ddp(torch.randn(3, 5), True).sum().backward()
    return module.right.weight.grad[0, 0].item()


def test_a_gradient_that_no_rank_has_computed_stays() -> None:
    assert on_ranks(untouched) == [0, 1]
