"""Hooks on the gradients of parameters that never outlive the one who watches them, and a check."""

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Watcher(Protocol):
    """Who is told that the gradient of parameter number `i` has been accumulated."""

    def on_gradient(self, i: int, parameter: Tensor) -> None: ...


_WATCHERS: "weakref.WeakValueDictionary[int, Watcher]" = weakref.WeakValueDictionary()
"""Who watches a parameter, by its id. A watcher keeps its parameters, so an id stays theirs."""


def watch(watcher: Watcher, parameters: Sequence[nn.Parameter]) -> None:
    """Call `watcher.on_gradient(i, parameter)` whenever autograd has accumulated a gradient.

    The hooks know the watcher weakly: they do not keep it alive, and go when it goes.
    """
    reference = weakref.ref(watcher)
    handles = [
        parameter.register_post_accumulate_grad_hook(partial(_tell, reference, i))  # type: ignore[no-untyped-call]
        for i, parameter in enumerate(parameters)
    ]
    weakref.finalize(watcher, _remove, handles)
    _WATCHERS.update({id(parameter): watcher for parameter in parameters})


def check_not_watched(names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
    """Raise `ValueError` if somebody watches one of the parameters already."""
    for name, parameter in zip(names, parameters, strict=True):
        if id(parameter) in _WATCHERS:
            raise ValueError(
                f"parameter {name!r} belongs to another DistributedDataParallel: "
                "wrap a module once, and wrap it whole"
            )


def check_gradient(name: str, parameter: Tensor, view: Tensor) -> None:
    """Raise `RuntimeError` if the parameter's gradient cannot travel in `view` of a bucket."""
    if parameter.grad is None or parameter.grad.layout != torch.strided:
        raise RuntimeError(
            f"gradient of {name!r} is sparse: buckets hold dense gradients only; "
            "use sparse=False in the embedding"
        )
    if (parameter.dtype, parameter.device) != (view.dtype, view.device):
        raise RuntimeError(
            f"{name!r} is {parameter.dtype} on {parameter.device}, but its bucket is "
            f"{view.dtype} on {view.device}: convert or move the module before wrapping it"
        )
    if torch.is_grad_enabled():
        raise RuntimeError("DistributedDataParallel does not work with create_graph=True")


def _tell(reference: "weakref.ref[Watcher]", i: int, parameter: Tensor) -> None:
    watcher = reference()
    if watcher is not None:
        watcher.on_gradient(i, parameter)


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()
