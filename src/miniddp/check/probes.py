"""What is noted: calls of torch that a training script makes, as they pass."""

import os
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.utils import clip_grad
from torch.optim import optimizer as torch_optimizer

from miniddp.check.around import stand_around
from miniddp.check.finding import Event
from miniddp.check.readings import (
    devices_in,
    find_unused,
    group_name,
    is_mean,
    leaves,
    random_state,
    running_statistics,
    sample_of_inputs,
    sample_of_state,
    sends_buffers,
    sends_buffers_now,
    settings_of,
    uses_cuda,
)
from miniddp.check.recorder import (
    Recorder,
    Sample,
    is_whole,
    user_line,
)
from miniddp.check.trained import Trained
from miniddp.ddp import DistributedDataParallel
from miniddp.naive import SimpleDDP

COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
)
SAME_SHAPE = {"all_reduce", "broadcast", "reduce"}
STEPS_BETWEEN = 10
"""From one look for parameters without an optimizer to the next."""
FIRST_STEPS = 2
"""In so many steps the optimizers' states are compared too."""


class Probes:
    """The probes of the training loop, and what they have to remember."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.wrappers: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.trained = Trained()
        self.ranks: dict[int, list[int]] = {}
        """Of each wrapped parameter, by its id, those of its process group."""
        self.awaited = 0
        """Forward passes of a wrapper whose backward has yet to come."""
        self.in_collective = False
        self.in_backward = False
        self.stepping: list[torch.optim.Optimizer] = []
        self.backward_lines: list[str] = []
        self.passes = 0
        self.is_scaled = False
        self.scaled: tuple[Tensor, Tensor] | None = None

    def install(self) -> None:
        for name in COLLECTIVES:
            stand_around(dist, name, self.collective, name)
        for name in ("send", "recv", "isend", "irecv", "batch_isend_irecv"):
            stand_around(dist, name, self.point_to_point)
        for wrapper in (TorchDDP, DistributedDataParallel, SimpleDDP):
            stand_around(wrapper, "__init__", self.wrap)
            stand_around(wrapper, "forward", self.forward)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            stand_around(clip_grad, name, self.clip)
        stand_around(torch.autograd, "backward", self.backward)
        stand_around(torch.amp.GradScaler, "scale", self.scale)
        stand_around(torch.amp.GradScaler, "unscale_", self.unscale)
        stand_around(torch.amp.GradScaler, "step", self.scaler_step)
        stand_around(torch.optim.Optimizer, "__init__", self.optimizer)
        stand_around(torch.optim.Optimizer, "zero_grad", self.zero_grad)
        stand_around(nn.Module, "zero_grad", self.zero_grad)
        stand_around(torch, "save", self.save)
        stand_around(torch, "load", self.load)
        stand_around(Join, "__enter__", self.join)
        torch_optimizer.register_optimizer_step_pre_hook(self.before_step)
        torch_optimizer.register_optimizer_step_post_hook(self.after_step)

    def collective(
        self, original: Callable[..., Any], name: str, *args: Any, **kwargs: Any
    ) -> Any:
        if self.in_collective:
            return original(*args, **kwargs)
        tensor = args[0] if args and isinstance(args[0], Tensor) else None
        group = group_name(kwargs.get("group"), args)
        shape = tuple(tensor.shape) if tensor is not None else None
        facts: Event = {"group": group, "shape": None, "elements": 1}
        if name in SAME_SHAPE and tensor is not None:
            facts["shape"] = f"{shape} {tensor.dtype}"
            facts["elements"] = tensor.numel()
        event: Event = {}
        if self.recorder.is_watching:
            event = self.recorder.note(
                "collective", operation=name, line=user_line(), **facts
            )
            self.note_gradient(event, tensor, args, kwargs)
        self.in_collective = True
        try:
            with self.recorder.inside(name, **facts):
                result = original(*args, **kwargs)
        finally:
            self.in_collective = False
        if event.get("gradient") and tensor is not None:
            event["after"] = Sample(["it"], [tensor])
        return result

    def note_gradient(
        self, event: Event, tensor: Tensor | None, args: Any, kwargs: Any
    ) -> None:
        """If a gradient is all-reduced by hand: which, and what it was."""
        if event["operation"] != "all_reduce" or tensor is None:
            return
        for name, parameter in self.trained.parameters():
            gradient = parameter.grad
            if gradient is None or gradient.data_ptr() != tensor.data_ptr():
                continue
            operation = kwargs.get("op", args[1] if len(args) > 1 else None)
            is_sum = operation in (None, dist.ReduceOp.SUM)
            event["gradient"] = name
            event["is_sum"] = is_sum
            event["before"] = Sample(["it"], [tensor])

    def point_to_point(
        self, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if self.recorder.is_watching:
            self.recorder.note("point to point", line=user_line())
        return original(*args, **kwargs)

    def wrap(
        self,
        original: Callable[..., Any],
        wrapper: nn.Module,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        with self.recorder.inside(
            "DistributedDataParallel(…)", group="", shape=None
        ):
            result = original(wrapper, *args, **kwargs)
        module: Any = wrapper.module
        group: Any = getattr(wrapper, "process_group", None)
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        for name, parameter in module.named_parameters():
            self.trained.names[id(parameter)] = name
            if parameter.requires_grad:
                self.ranks[id(parameter)] = ranks
        self.wrappers.add(wrapper)
        self.recorder.note(
            "wrap",
            line=user_line(),
            find_unused=find_unused(wrapper),
            averages=not isinstance(wrapper, SimpleDDP),
            sends_buffers=sends_buffers(wrapper),
        )
        return result

    def forward(
        self,
        original: Callable[..., Any],
        wrapper: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        averages = getattr(wrapper, "require_backward_grad_sync", False)
        is_training = torch.is_grad_enabled()
        will_send = bool(is_training and averages)
        event: Event = {}
        if self.recorder.is_watching:
            event = self.recorder.note(
                "forward",
                line=user_line(),
                is_training=is_training and wrapper.training,
                will_send=will_send,
                inputs=sample_of_inputs((*args, *kwargs.values())),
                random=random_state(),
            )
            self.note_buffers(event, wrapper)
        group = "" if will_send or sends_buffers_now(wrapper) else None
        with self.recorder.inside("the forward pass", group=group, shape=None):
            output = original(wrapper, *args, **kwargs)
        if will_send:
            self.awaited += 1
        if event:
            event["draws"] = random_state() != event["random"]
        return output

    def note_buffers(self, event: Event, wrapper: Any) -> None:
        """Buffers as forward begins; and that it sends them, if it does."""
        buffers = dict(wrapper.module.named_buffers())
        if not buffers:
            return
        if event["is_training"]:
            event["buffers"] = Sample(buffers, buffers.values())
            event["statistics"] = running_statistics(wrapper.module)
        if sends_buffers_now(wrapper):
            self.recorder.note(
                "collective",
                operation="forward, which sends the buffers",
                line=event["line"],
                group="",
                shape=None,
            )

    def backward(
        self, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if self.in_backward:
            return original(*args, **kwargs)
        event: Event = {}
        sends = self.awaited > 0
        if self.recorder.is_watching:
            event = self.note_backward(
                args[0] if args else kwargs["tensors"], sends
            )
        self.in_backward = True
        try:
            group = "" if sends else None
            with self.recorder.inside("backward", group=group, shape=None):
                result = original(*args, **kwargs)
        finally:
            self.in_backward = False
        self.awaited = 0
        is_early = self.recorder.step < FIRST_STEPS and not self.wrappers
        if event and (is_early or self.backward_lines.count(event["line"]) > 1):
            event["gradients"] = self.trained.gradients()
        return result

    def note_backward(self, tensors: Any, sends: bool) -> Event:
        loss = tensors if isinstance(tensors, Tensor) else None
        line = user_line()
        self.backward_lines.append(line)
        self.passes += 1
        if sends:
            self.recorder.note(
                "collective",
                operation="backward, which averages",
                line=line,
                group="",
                shape=None,
            )
        is_held_back = any(
            not getattr(wrapper, "require_backward_grad_sync", True)
            for wrapper in self.wrappers
        )
        event = self.recorder.note(
            "backward",
            line=line,
            sends=sends,
            is_held_back=is_held_back,
            is_mean=False,
            in_step=bool(self.stepping),
            busy=time.monotonic() - self.recorder.free_since,
        )
        if loss is not None and loss.numel() == 1:
            event["loss"] = Sample(["loss"], [loss.detach().clone()])
            event["is_finite"] = loss.detach().isfinite().all()
            if self.scaled is not None and self.scaled[1] is loss:
                loss = self.scaled[0]
            event["is_mean"] = is_mean(loss)
            searching = [w for w in self.wrappers if find_unused(w)]
            if searching:
                found = leaves(loss)
                event["has_unused"] = any(
                    parameter.requires_grad and id(parameter) not in found
                    for wrapper in searching
                    for parameter in wrapper.parameters()
                )
        return event

    def clip(
        self,
        original: Callable[..., Any],
        parameters: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not self.recorder.is_watching:
            return original(parameters, *args, **kwargs)
        if not isinstance(parameters, Tensor | list):
            parameters = list(parameters)
        clipped = [parameters] if isinstance(parameters, Tensor) else parameters
        held = [p for p in clipped if p.grad is not None and is_whole(p)]
        names = [self.trained.name_of(parameter) for parameter in held]
        self.recorder.note(
            "clip",
            line=user_line(),
            is_scaled=self.is_scaled,
            gradients=Sample(
                names, [p.grad for p in held if p.grad is not None]
            ),
        )
        return original(parameters, *args, **kwargs)

    def scale(
        self,
        original: Callable[..., Any],
        scaler: Any,
        outputs: Any,
        *args: Any,
    ) -> Any:
        result = original(scaler, outputs, *args)
        if scaler.is_enabled() and isinstance(outputs, Tensor):
            self.is_scaled = scaler.get_scale() != 1
            self.scaled = (outputs, result)
        return result

    def unscale(
        self, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        self.is_scaled = False
        return original(*args, **kwargs)

    def scaler_step(
        self, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        before = self.recorder.step
        result = original(*args, **kwargs)
        if self.recorder.step == before:  # left out: not all is finite
            self.recorder.end_step()
        return result

    def zero_grad(
        self, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        self.backward_lines = []
        if self.recorder.is_watching:
            self.recorder.note("zero")
        return original(*args, **kwargs)

    def optimizer(
        self,
        original: Callable[..., Any],
        optimizer: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        self.trained.references.append(weakref.ref(optimizer))
        return original(optimizer, *args, **kwargs)

    def before_step(self, optimizer: Any, *_: Any) -> None:
        try:
            self.note_step(optimizer)
        except Exception as error:
            self.recorder.give_up(error)

    def note_step(self, optimizer: Any) -> None:
        if optimizer in self.stepping:  # its last step has raised
            self.stepping.clear()
        self.stepping.append(optimizer)
        if len(self.stepping) > 1 or not self.recorder.is_watching:
            return
        names, parameters = self.trained.named(optimizer)
        held = [
            (name, parameter.grad)
            for name, parameter in zip(names, parameters, strict=True)
            if parameter.grad is not None and not parameter.grad.is_sparse
        ]
        gradients = Sample(
            [name for name, _ in held], [gradient for _, gradient in held]
        )
        ranks = self.recorder.ranks
        for parameter in parameters:
            ranks = tuple(self.ranks.get(id(parameter), ranks))
        event = self.recorder.note(
            "step",
            line=user_line(),
            optimizer=type(optimizer).__name__,
            ranks=ranks,
            is_wrapped=bool(self.wrappers),
            in_backward=self.in_backward,
            passes=self.passes,
            settings=settings_of(optimizer),
            weights=Sample(names, parameters),
            gradients=gradients,
            is_finite=gradients.values.isfinite().all(),
            unsent=[
                name
                for name, parameter in zip(names, parameters, strict=True)
                if parameter.grad is not None
                and id(parameter) not in self.ranks
            ],
        )
        if self.recorder.step % STEPS_BETWEEN < FIRST_STEPS:
            event["left_out"] = self.trained.left_out(self.wrappers)
        if self.recorder.step < FIRST_STEPS:
            event["state"] = sample_of_state(
                optimizer, dict(zip(names, parameters, strict=False))
            )
        self.backward_lines = []
        self.is_scaled = False

    def after_step(self, optimizer: Any, *_: Any) -> None:
        if optimizer in self.stepping:
            del self.stepping[self.stepping.index(optimizer) :]
        if not self.stepping:
            self.recorder.end_step()

    def save(
        self,
        original: Callable[..., Any],
        content: Any,
        file: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if isinstance(file, str | os.PathLike):
            path = os.path.realpath(file)
            self.recorder.note(
                "save", line=user_line(), path=path, host=os.uname().nodename
            )
        return original(content, file, *args, **kwargs)

    def load(
        self, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        result = original(*args, **kwargs)
        if uses_cuda() and isinstance(result, dict):
            here = torch.cuda.current_device()
            elsewhere = sorted(devices_in(result) - {here})
            if elsewhere:
                self.recorder.note(
                    "load", line=user_line(), here=here, elsewhere=elsewhere
                )
        return result

    def join(self, original: Callable[..., Any], *args: Any) -> Any:
        self.recorder.note("join", line=user_line())
        return original(*args)
