"""What forward returns: the tensors in it, and what their graph reaches."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

PLAIN = frozenset({bool, bytes, complex, float, int, str, type(None)})
"""Types that hold no tensors, of which an output may have many."""


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Those in lists, tuples, mappings, dataclasses and pytrees, any depth."""
    waiting = [value]
    seen: dict[int, Any] = {}
    while waiting:
        part = waiting.pop()
        if type(part) in PLAIN:
            continue
        if isinstance(part, Tensor):
            yield part
        elif id(part) not in seen:
            seen[id(part)] = part
            waiting += parts_of(part)


def parts_of(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple | set):
        return list(value)
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in fields(value)]
    if type(value) in pytree.SUPPORTED_NODES:
        return pytree.tree_leaves(value)
    return []


def has_graph(value: Any) -> bool:
    return isinstance(value, Tensor) and value.grad_fn is not None


def tensors_with_graph(value: Any) -> Iterator[Tensor]:
    return filter(has_graph, tensors_in(value))


def reached_leaves(output: Any) -> set[Tensor]:
    """The leaves of the output's graph: backward gives them a gradient."""
    leaves: set[Tensor] = set()
    waiting: list[Any] = []
    for tensor in tensors_in(output):
        if tensor.grad_fn is not None:
            waiting.append(tensor.grad_fn)
        elif tensor.requires_grad:  # a parameter that forward returns
            leaves.add(tensor)
    seen: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        waiting += [function for function, _ in node.next_functions]
        if hasattr(node, "variable"):
            leaves.add(node.variable)
    return leaves


def join_graphs(output: Any) -> Any:
    """The same output; backward through one tensor of it comes by them all.

    So the hooks of parameters behind a tensor that is not in the loss run, too.
    A container of a class that pytree does not know stays as it is.
    """
    tensors = filter(has_graph, pytree.tree_leaves(output))
    joined = iter(Joined.apply(*tensors))  # type: ignore[no-untyped-call]
    return pytree.tree_map_only(has_graph, lambda _: next(joined), output)


class Joined(torch.autograd.Function):
    """The identity of several tensors at once."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # to those not in the loss: None
        return tuple(tensor.clone() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return gradients
