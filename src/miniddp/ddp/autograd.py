"""What the reducer asks of autograd: nodes, hooks, the end of backward."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge


def node_of(parameter: Tensor) -> Any:
    """The node that accumulates its gradient: another after `.data = …`."""
    subclass = torch._C.DisableTorchFunctionSubclass()  # which may add a node
    transform = torch._C._DisableFuncTorch()  # which has a graph of its own
    with subclass, transform:
        return get_gradient_edge(parameter).node


def after_backward(fn: Callable[[], None]) -> None:
    """Have autograd call `fn` when the backward pass that runs now is over."""
    torch.autograd.Variable._execution_engine.queue_callback(fn)


def call(method: weakref.WeakMethod[Callable[[], None]], _: Tensor) -> None:
    """Call the method if its object still lives."""
    if bound := method():
        bound()


def remove_all(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()
