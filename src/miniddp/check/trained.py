"""What a script trains: its optimizers, their parameters, and their names."""

import sys
import weakref
from collections.abc import Iterable
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from miniddp.check.recorder import user_frames
from miniddp.check.samples import is_whole

Optimizer = torch.optim.Optimizer


class Trained:
    """Holds no optimizer alive; a name is a module's, where one is found."""

    def __init__(self) -> None:
        self.numbers: weakref.WeakKeyDictionary[Optimizer, int]
        self.numbers = weakref.WeakKeyDictionary()
        self.next_number = count()
        self.numbers_by_parameter: Any = WeakTensorKeyDictionary()
        """Of the first parameter: an optimizer made anew keeps its number."""
        self.known: weakref.WeakKeyDictionary[
            Optimizer, tuple[list[int], dict[str, Tensor]]
        ] = weakref.WeakKeyDictionary()
        self.names: Any = WeakTensorKeyDictionary()
        self.ignored: set[int] = set()
        """The ids of parameters that a wrapper is told to leave alone."""
        self.pointers: dict[int, str] = {}
        """Where gradients lie; empty if they may have moved."""
        self.weights: set[int] = set()
        """Where weights lie, as of then."""
        self.elements = 0
        """Of all gradients, as of then."""

    def add(self, optimizer: Optimizer) -> None:
        first = parameters_of(optimizer)[0]
        numbers = self.numbers_by_parameter
        number = numbers.setdefault(first, next(self.next_number))
        self.numbers[optimizer] = number

    def parameters(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Those of which this rank holds the whole."""
        parameters = parameters_of(optimizer)
        ids = [id(parameter) for parameter in parameters]
        before, named = self.known.get(optimizer, ([], {}))
        if before != ids:
            named = {}
            for parameter in filter(is_whole, parameters):
                if id(parameter) in self.ignored:
                    continue
                name = self.name_of(parameter)
                while name in named:
                    name += "'"
                named[name] = parameter
            self.known[optimizer] = (ids, named)
        return named

    def gradients(self) -> dict[str, Tensor]:
        gradients = {}
        for optimizer in list(self.numbers):
            gradients.update(gradients_of(self.parameters(optimizer)))
        return gradients

    def gradient_at(self, pointer: int) -> str | None:
        """The name of the parameter whose gradient begins there."""
        if not self.pointers:
            gradients = self.gradients()
            for name, gradient in gradients.items():
                self.pointers[gradient.data_ptr()] = name
            self.elements = sum(g.numel() for g in gradients.values())
            for optimizer in list(self.numbers):
                named = self.parameters(optimizer)
                self.weights.update(p.data_ptr() for p in named.values())
        return self.pointers.get(pointer)

    def left_out(self, wrappers: Iterable[nn.Module]) -> dict[str, Tensor]:
        """Parameters that have a gradient, and no optimizer."""
        held = {
            id(parameter)
            for optimizer in list(self.numbers)
            for parameter in parameters_of(optimizer)
        }
        return {
            name: parameter
            for wrapper in wrappers
            for name, parameter in wrapper.named_parameters()
            if parameter.grad is not None and id(parameter) not in held
        }

    def name_of(self, parameter: Tensor) -> str:
        if parameter not in self.names:
            self.look_for_names()
        unknown = f"a parameter of shape {tuple(parameter.shape)}"
        return str(self.names.get(parameter, unknown))

    def look_for_names(self) -> None:
        """In the variables of the script: of modules, and of `self`."""
        for frame in user_frames(sys._getframe(1)):
            values = list(frame.f_locals.values())
            its_object = frame.f_locals.get("self")
            values += getattr(its_object, "__dict__", {}).values()
            for value in values:
                if isinstance(value, nn.Module):
                    for name, parameter in value.named_parameters():
                        self.names.setdefault(parameter, name)


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def gradients_of(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: parameter.grad
        for name, parameter in parameters.items()
        if parameter.grad is not None and parameter.grad.layout == torch.strided
    }
