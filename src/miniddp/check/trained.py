"""What a script trains: its optimizers, their parameters, and their names."""

import sys
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from miniddp.check.readings import parameters_of
from miniddp.check.recorder import Sample, is_whole, user_frames


class Trained:
    """Holds no optimizer alive; a name is a module's, where one is found."""

    def __init__(self) -> None:
        self.references: list[weakref.ref[torch.optim.Optimizer]] = []
        self.named_before: weakref.WeakKeyDictionary[
            torch.optim.Optimizer, tuple[list[int], list[str], list[Tensor]]
        ] = weakref.WeakKeyDictionary()
        self.names: dict[int, str] = {}

    def living(self) -> list[torch.optim.Optimizer]:
        optimizers = (reference() for reference in self.references)
        return [optimizer for optimizer in optimizers if optimizer is not None]

    def parameters(self) -> list[tuple[str, Tensor]]:
        """Names and parameters of all optimizers, but for sharded ones."""
        parameters = []
        for optimizer in self.living():
            for parameter in parameters_of(optimizer):
                if is_whole(parameter):
                    parameters.append((self.name_of(parameter), parameter))
        return parameters

    def gradients(self) -> Sample:
        held = [
            (name, p.grad)
            for name, p in self.parameters()
            if p.grad is not None
        ]
        return Sample(
            [name for name, _ in held], [gradient for _, gradient in held]
        )

    def named(
        self, optimizer: torch.optim.Optimizer
    ) -> tuple[list[str], list[Tensor]]:
        """Its parameters that are whole, and their names."""
        everything = parameters_of(optimizer)
        ids = [id(parameter) for parameter in everything]
        if optimizer not in self.named_before:
            self.named_before[optimizer] = ([], [], [])
        known, names, parameters = self.named_before[optimizer]
        if known != ids:
            parameters = [p for p in everything if is_whole(p)]
            names = [self.name_of(parameter) for parameter in parameters]
            self.named_before[optimizer] = (ids, names, parameters)
        return names, parameters

    def left_out(self, wrappers: Iterable[nn.Module]) -> list[str]:
        """Parameters that have a gradient, and no optimizer."""
        held = {
            id(parameter)
            for optimizer in self.living()
            for parameter in parameters_of(optimizer)
        }
        return [
            name
            for wrapper in wrappers
            for name, parameter in wrapper.named_parameters()
            if parameter.grad is not None and id(parameter) not in held
        ]

    def name_of(self, parameter: Tensor) -> str:
        if id(parameter) not in self.names:
            self.look_for_names()
        unknown = f"a parameter of shape {tuple(parameter.shape)}"
        return self.names.setdefault(
            id(parameter), f"{unknown}, no. {len(self.names)}"
        )

    def look_for_names(self) -> None:
        """In the variables of the script: of modules, and of `self`."""
        for frame in user_frames(sys._getframe(1)):
            values = list(frame.f_locals.values())
            values += getattr(
                frame.f_locals.get("self"), "__dict__", {}
            ).values()
            for value in values:
                if isinstance(value, nn.Module):
                    for name, parameter in value.named_parameters():
                        self.names.setdefault(id(parameter), name)
