"""Models from a spec: blocks, outputs, and what is done to them before and after wrapping."""

import copy
from collections import OrderedDict, UserDict
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Spec = dict[str, Any]
WIDTH = 6
DTYPES = {"double": torch.float64, "bfloat16": torch.bfloat16}


@dataclass
class Answer:
    logits: Any
    heads: Any = None


class Named(OrderedDict[str, Any]):
    """As the outputs of many libraries."""


class Pair(list[Any]):
    pass


OUTPUTS: dict[str, Callable[[list[Tensor]], Any]] = {
    "tensor": lambda heads: heads[0] if len(heads) == 1 else tuple(heads),
    "tuple": tuple,
    "list": list,
    "dict": lambda heads: {str(i): head for i, head in enumerate(heads)},
    "dict subclass": lambda heads: Named((str(i), head) for i, head in enumerate(heads)),
    "list subclass": Pair,
    "mapping": lambda heads: UserDict({str(i): head for i, head in enumerate(heads)}),
    "dataclass": lambda heads: Answer(heads[0], heads[1:]),
    "nested": lambda heads: [{"deep": Named(out=(heads[0], "text", None))}, *heads[1:]],
}


def heads_of(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, dict | UserDict):
        output = list(output.values())
    elif is_dataclass(output):
        output = [getattr(output, field.name) for field in fields(output)]
    if not isinstance(output, list | tuple):
        return []
    return [head for part in output for head in heads_of(part)]


# Blocks: (batch, WIDTH) -> (batch, WIDTH)


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.table((x.detach().float() * 3).long().sum(1) % 7)


class Convolved(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, size, padding=size // 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.view(-1, 2, 1, 3)).flatten(1)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.weight.dtype) @ self.weight).abs()


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(()))
        self.nothing = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.nothing.sum()


class Buffered(nn.Module):
    """It multiplies by a buffer, and counts its training passes in it."""

    def __init__(self, kind: str, rank: int) -> None:
        super().__init__()
        buffers = {
            "float": torch.full((WIDTH,), 0.5 + rank),
            "int": torch.tensor(2 + rank),
            "bool": torch.arange(WIDTH) % 2 == rank % 2,
            "half": torch.full((WIDTH,), 0.5 + rank, dtype=torch.float16),
            "int16": torch.full((WIDTH,), 1 + rank, dtype=torch.int16),
            "complex": torch.full((WIDTH,), 0.5 + rank, dtype=torch.complex64),
            "expanded": torch.full((1,), 0.5 + rank).expand(WIDTH),
            "transposed": torch.full((WIDTH, 3), 0.5 + rank).t(),
            "empty": torch.zeros(0),
            "sized": torch.full((1 + rank,), 0.5 + rank),
            "sparse": torch.eye(WIDTH).to_sparse() * (1 + rank),
        }
        self.line = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("value", buffers[kind])
        self.counts = kind in ("float", "int", "half", "transposed", "sized")

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.counts:
            self.value += 1
        factor = self.value.to_dense() if self.value.is_sparse else self.value
        if factor.is_complex():
            factor = factor.real
        return self.line(x) * (factor.to(x.dtype).sum() + 1) / 9


def make(block: Spec, rank: int) -> nn.Module:
    kind = block["kind"]
    if kind == "buffer":
        return Buffered(block["buffer"], rank)
    if kind == "sparse weight":
        line = nn.Linear(WIDTH, WIDTH)
        line.weight = nn.Parameter(torch.eye(WIDTH).to_sparse())
        return line
    return {
        "linear": lambda: nn.Linear(WIDTH, WIDTH),
        "wide": lambda: nn.Sequential(
            nn.Linear(WIDTH, 40), nn.Tanh(), nn.Sequential(nn.Linear(40, WIDTH))
        ),
        "embedding": Embedded,
        "layer norm": lambda: nn.LayerNorm(WIDTH),
        "batch norm": lambda: nn.BatchNorm1d(WIDTH),
        "conv": lambda: Convolved(3),
        "conv 1x1": lambda: Convolved(1),
        "complex": Complex,
        "scalar": Scalar,
        "lazy": lambda: nn.LazyLinear(WIDTH),
    }[kind]()


class Block(nn.Module):
    """A part of the model in its own dtype, perhaps checkpointed, or run twice."""

    def __init__(self, block: Spec, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner.to(DTYPES[block["dtype"]]) if "dtype" in block else inner
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        dtype = DTYPES.get(self.block.get("dtype", ""), x.dtype)
        for _ in range(2 if self.block.get("twice") else 1):
            y = x.tanh().to(dtype)
            if how := self.block.get("checkpoint"):
                y = checkpoint(self.inner, y, use_reentrant=how == "reentrant")
            else:
                y = self.inner(y)
            x = x + y.to(x.dtype)
        return x


class Net(nn.Module):
    def __init__(self, spec: Spec, rank: int) -> None:
        super().__init__()
        self.spec = spec
        self.blocks = nn.ModuleList()
        for block in spec["blocks"]:
            self.blocks.append(Block(block, self.inner(block, rank)))
        heads = 2 if spec.get("two heads") else 1
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 2) for _ in range(heads))
        if spec.get("output") == "with parameter":
            self.scale = nn.Parameter(torch.ones(()))

    def inner(self, block: Spec, rank: int) -> nn.Module:
        earlier = [other.inner for other in self.blocks]
        if block.get("same") and earlier:
            return earlier[0]  # type: ignore[return-value]
        inner = make(block, rank)
        first = earlier[0] if earlier else None
        if block.get("tied") and isinstance(inner, nn.Linear) and isinstance(first, nn.Linear):
            inner.weight = first.weight
        return inner

    def forward(self, x: Tensor, used: list[bool]) -> Any:
        for block, use in zip(self.blocks, used, strict=True):
            x = block(x) if use else x
        heads = [head(x) for head in self.heads]
        if self.spec.get("output") == "with parameter":
            return heads[0], self.scale
        return OUTPUTS[self.spec.get("output", "tensor")](heads)


# What is done to the model before or after it is wrapped


def alter(net: Net, spec: Spec, rank: int, when: str) -> None:
    """Layouts, freezing, dtypes and differences between ranks."""
    for block, change in zip(net.blocks, spec["blocks"], strict=True):
        layout = change.get("layout")
        if layout and layout["when"] == when and (layout["ranks"] == "all" or rank == 1):
            change_layout(block, layout["how"])
        if change.get("frozen") == when:
            block.requires_grad_(False)
        if when == "after" and change.get("frozen") == "thawed after":
            block.requires_grad_(True)
        if when == "before" and change.get("frozen") == "thawed after":
            block.requires_grad_(False)
        if when == "before" and change.get("grad dtype"):
            for p in block.parameters():
                p.grad_dtype = torch.float32 if p.dtype == torch.bfloat16 else None
    if spec.get("replaced") == when:
        head = net.heads[0]
        head.weight = nn.Parameter(head.weight.detach().clone())
    if when == "before" and rank == 1 and "differs" in spec:
        differ(net, spec["differs"])


def change_layout(block: nn.Module, how: str) -> None:
    for p in block.parameters():
        if how == "transposed" and p.dim() == 2:
            p.data = p.data.t().contiguous().t()
        elif how == "channels last" and p.dim() == 4:
            p.data = p.data.contiguous(memory_format=torch.channels_last)
        elif how == "strides of size one" and p.dim() == 4:
            p.data = p.data.contiguous().as_strided(p.shape, as_channels_last(p.shape))
        elif how == "gaps" and p.dim() == 2:
            p.data = torch.cat([p.data, p.data], 1)[:, : p.shape[1]]


def as_channels_last(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, memory_format=torch.channels_last).stride()


def differ(net: Net, how: str) -> None:
    head = net.heads[0]
    if how == "shape":
        net.heads[0] = nn.Linear(WIDTH, 3)
    elif how == "dtype":
        head.bias.data = head.bias.data.double()
    elif how == "frozen":
        head.bias.requires_grad_(False)
    elif how == "more":
        net.heads.append(nn.Linear(WIDTH, 1))


def add_hooks(net: Net, spec: Spec, when: str) -> None:
    hook = spec.get("hook")
    if not hook or hook["when"] != when:
        return
    parameters = [p for p in net.parameters() if p.requires_grad]
    for p in parameters if hook["on"] == "all" else parameters[-1:]:
        if hook["kind"] == "tensor":
            p.register_hook(lambda gradient: gradient * 2)
        else:
            p.register_post_accumulate_grad_hook(HOOKS[hook["kind"]])


@torch.no_grad()
def clamp(p: Tensor) -> None:
    if p.is_complex():
        p.grad.mul_(0.5)
    else:
        p.grad.clamp_(-0.01, 0.01)


@torch.no_grad()
def scale(p: Tensor) -> None:
    p.grad.mul_(0.5)


@torch.no_grad()
def replace(p: Tensor) -> None:
    p.grad = p.grad * 0.5


@torch.no_grad()
def step_inside(p: Tensor) -> None:
    p.sub_(p.grad, alpha=0.01)
    p.grad = None


HOOKS = {"clamp": clamp, "scale": scale, "replace": replace, "step": step_inside}


class Twice(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.second = second

    def forward(self, x: Tensor, used: list[bool]) -> Any:
        first = heads_of(self.first(x, used))
        second = heads_of(self.second(x * 2, used))
        return [one + other for one, other in zip(first, second, strict=True)]


Wrap = Callable[[nn.Module], nn.Module]


def wrapped(net: Net, spec: Spec, wrap: Wrap) -> nn.Module:
    kind = spec.get("wrap")
    if kind == "inside":
        net.blocks[0].inner = wrap(net.blocks[0].inner)
    if kind == "beside":
        return Twice(wrap(net), wrap(net))
    if kind == "around":
        return wrap(wrap(net))
    if kind == "deep copy":
        return copy.deepcopy(wrap(net))
    return wrap(net)
