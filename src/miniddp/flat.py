"""The parameters of a module as one flat vector that can be cut into equal shards."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_EMPTIED: "WeakSet[nn.Module]" = WeakSet()
"""Modules whose parameters were taken."""

_TAKEN: "WeakValueDictionary[int, nn.Parameter]" = WeakValueDictionary()
"""Parameters that were taken out of one module and live on, because another one has them too."""


class Slot(NamedTuple):
    """A parameter's shape, and the modules that have it, by its name there: several if tied."""

    shape: torch.Size
    places: dict[str, nn.Module]


class FlatParameters:
    """Where the parameters of `module` lie in a flat vector, zero-padded to `world_size` parts.

    Modules of type `skip` inside it keep theirs. A tied parameter lies there once.

    Raises `ValueError` if a parameter was taken before, from this module or from another one, or if
    the parameters differ in dtype, device or `requires_grad`.
    """

    def __init__(self, module: nn.Module, world_size: int, skip: type[nn.Module]) -> None:
        slots: dict[nn.Parameter, Slot] = {}
        for name, owner, parameter in _own_parameters(module, skip):
            slot = slots.setdefault(parameter, Slot(parameter.shape, {}))
            slot.places[name] = owner
        for parameter, slot in slots.items():
            _check(next(iter(slot.places)), parameter, next(iter(slots)))
        self.slots = list(slots.values())
        self.requires_grad = any(parameter.requires_grad for parameter in slots)
        self._world_size = world_size
        self._parameters = list(slots)

    @torch.no_grad()
    def take(self) -> Tensor:
        """Move the parameters out of their modules, which have None instead, into a new vector."""
        whole = self.flatten(self._parameters)
        for parameter, slot in zip(self._parameters, self.slots, strict=True):
            _TAKEN[id(parameter)] = parameter
            for name, owner in slot.places.items():
                owner._parameters.pop(_last(name), None)
                _EMPTIED.add(owner)
        self._parameters = []
        self.place(None)
        return whole

    def flatten(self, tensors: Sequence[Tensor]) -> Tensor:
        """One tensor per slot, one behind the other, and the padding."""
        whole = torch.cat([tensor.reshape(-1) for tensor in tensors])
        return F.pad(whole, (0, -len(whole) % self._world_size))

    def split(self, whole: Tensor) -> list[Tensor]:
        """One view per slot. A single split, so that autograd builds one gradient for all."""
        sizes = [slot.shape.numel() for slot in self.slots]
        views = torch.split(whole, [*sizes, len(whole) - sum(sizes)])
        return [view.view(slot.shape) for view, slot in zip(views, self.slots, strict=False)]

    def place(self, whole: Tensor | None) -> None:
        """Give the modules their parts of `whole` as plain attributes, or None."""
        views = [None] * len(self.slots) if whole is None else self.split(whole)
        for slot, view in zip(self.slots, views, strict=True):
            for name, owner in slot.places.items():
                setattr(owner, _last(name), view)


def _own_parameters(
    module: nn.Module, skip: type[nn.Module], prefix: str = ""
) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """Name, owner and parameter, once for every place that a parameter has."""
    if module in _EMPTIED:
        raise ValueError(
            f"{type(module).__name__} {prefix.rstrip('.')!r} is in another unit already: "
            "use that unit in every place of the module"
        )
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield f"{prefix}{name}", module, parameter
    for name, child in module._modules.items():
        if child is not None and not isinstance(child, skip):
            yield from _own_parameters(child, skip, f"{prefix}{name}.")


def _check(name: str, parameter: nn.Parameter, first: nn.Parameter) -> None:
    if id(parameter) in _TAKEN:
        raise ValueError(
            f"parameter {name!r} is tied to one that is in another unit already: wrap both places "
            "of a tied parameter in the same unit"
        )
    for field in ("dtype", "device", "requires_grad"):
        own, wanted = getattr(parameter, field), getattr(first, field)
        if own != wanted:
            raise ValueError(
                f"parameter {name!r} has {field}={own}, the unit's first has {field}={wanted}: "
                "wrap the layer that differs as a unit of its own"
            )


def _last(name: str) -> str:
    return name.rpartition(".")[2]
