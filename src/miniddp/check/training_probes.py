"""What is noted of training: wrappers, passes, optimizers and their steps."""

import functools
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.utils import clip_grad
from torch.optim import optimizer as torch_optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from miniddp.check.finding import Event
from miniddp.check.probe import Call, Notes, stand_around
from miniddp.check.recorder import Recorder, user_line, user_path
from miniddp.check.samples import (
    Sample,
    columns_of,
    is_of_split_layer,
    is_whole,
    largest_of,
)
from miniddp.check.trained import (
    Optimizer,
    Trained,
    gradients_of,
    parameters_of,
)
from miniddp.check.training_facts import (
    find_unused,
    is_mean,
    mode_of,
    random_state,
    running_statistics,
    sample_of_state,
    sends_buffers,
    settings_of,
    unused_bytes,
)
from miniddp.ddp import DistributedDataParallel
from miniddp.ddp.checks import IGNORED
from miniddp.naive import SimpleDDP

STEPS_BETWEEN = 5
"""From one look for parameters without an optimizer to the next."""
UNFINISHED = "Expected to have finished reduction"
"""What torch's wrapper says where parameters got no gradient."""
IN_NO_SYNC = "no_sync"
FIRST_STEPS = 2
"""In so many steps the optimizers' states are compared too."""


def install(recorder: Recorder, trained: Trained) -> None:
    probes = TrainingProbes(recorder, trained)
    watch = functools.partial(stand_around, recorder)
    for wrapper in (TorchDDP, DistributedDataParallel, SimpleDDP):
        watch(wrapper, "__init__", probes.wrap)
        watch(wrapper, "forward", probes.forward)
    watch(torch.autograd, "backward", probes.backward)
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        watch(clip_grad, name, probes.clip)
    watch(torch.amp.GradScaler, "scale", probes.scale)
    watch(torch.amp.GradScaler, "unscale_", probes.unscale)
    watch(torch.amp.GradScaler, "step", probes.scaler_step)
    watch(Optimizer, "__init__", probes.make_optimizer)
    watch(Optimizer, "zero_grad", probes.zero_grad)
    watch(nn.Module, "zero_grad", probes.zero_grad)
    torch_optimizer.register_optimizer_step_pre_hook(probes.before_step)
    torch_optimizer.register_optimizer_step_post_hook(probes.after_step)


class TrainingProbes:
    def __init__(self, recorder: Recorder, trained: Trained) -> None:
        self.recorder = recorder
        self.trained = trained
        self.wrappers: weakref.WeakKeyDictionary[Any, dict[str, Tensor]]
        self.wrappers = weakref.WeakKeyDictionary()
        """Of each its buffers."""
        self.ranks: Any = WeakTensorKeyDictionary()
        """Of each wrapped parameter those of its process group."""
        self.numbers: dict[int, int] = {}
        """Of the wrappers, by their ids."""
        self.wrapper_of: Any = WeakTensorKeyDictionary()
        """The id of its wrapper."""
        self.last_forward: dict[int, int] = {}
        """Of a wrapper, by its id: how many backward passes were before."""
        self.last_step: weakref.WeakKeyDictionary[Optimizer, int]
        self.last_step = weakref.WeakKeyDictionary()
        """Of an optimizer: how many backward passes were before."""
        self.awaited: weakref.WeakSet[Any] = weakref.WeakSet()
        """The wrappers whose backward pass has yet to come."""
        self.is_held_back = False
        """Whether the last forward pass was inside no_sync."""
        self.in_backward = False
        self.passes = 0
        self.origins: list[str] = []
        """Of the backward passes since the last step."""
        self.stepping: Optimizer | None = None
        """The outermost, if one steps by another."""
        self.step: Event = {}
        """What is known of a step that has not yet ended."""
        self.is_scaled = False
        self.scaled: tuple[Tensor, Tensor, float] | None = None
        """The last loss, what GradScaler has made of it, and its factor."""

    def wrap(self, call: Call) -> Notes:
        wrapper = call.args[0]
        with self.recorder.inside("DistributedDataParallel(…)", group=""):
            yield
        group: Any = getattr(wrapper, "process_group", None)
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        ignored: Any = getattr(wrapper.module, IGNORED, ())
        for name, parameter in wrapper.module.named_parameters():
            self.trained.names[parameter] = name
            if name in ignored:
                self.trained.ignored.add(id(parameter))
            elif parameter.requires_grad:
                self.ranks[parameter] = ranks
                self.wrapper_of[parameter] = id(wrapper)
        self.numbers[id(wrapper)] = len(self.numbers)
        self.wrappers[wrapper] = dict(wrapper.module.named_buffers())
        self.recorder.note(
            "wrap",
            line=user_line(),
            find_unused=find_unused(wrapper),
            averages=not isinstance(wrapper, SimpleDDP),
        )

    def forward(self, call: Call) -> Notes:
        wrapper = call.args[0]
        syncs = getattr(wrapper, "require_backward_grad_sync", None)
        will_send = torch.is_grad_enabled() and bool(syncs)
        is_due = getattr(wrapper, "require_forward_param_sync", False)
        buffers = self.wrappers.get(wrapper, {})
        sends_now = bool(buffers) and is_due and sends_buffers(wrapper)
        event: Event = {}
        inputs = [call.args[1:], call.keywords]
        if self.recorder.is_watching:
            is_training = torch.is_grad_enabled() and wrapper.training
            event = self.recorder.note(
                "forward",
                line=user_line(),
                wrapper=self.numbers.get(id(wrapper)),
                is_training=is_training,
                will_send=will_send,
                mode=mode_of(wrapper) if torch.is_grad_enabled() else None,
                largest=largest_of(inputs),
                inputs=columns_of(inputs),
                random=random_state(),
                drawn=[],
            )
            if is_training and buffers:
                event["statistics"] = running_statistics(buffers)
                if not sends_buffers(wrapper):
                    event["buffers"] = Sample(buffers)
            if sends_now:
                self.note_collective("forward, which sends the buffers")
        group = "" if will_send or sends_now else None
        try:
            with self.recorder.inside("the forward pass", group):
                yield
        finally:
            if str(call.error).startswith(UNFINISHED):
                self.recorder.note("unfinished", line=user_line())
        if will_send:
            self.awaited.add(wrapper)
        if torch.is_grad_enabled():
            self.last_forward[id(wrapper)] = self.passes
            self.is_held_back = syncs is False
        if event and event["is_training"] and random_state() != event["random"]:
            event["drawn"] = [event["random"]]

    def note_collective(self, operation: str) -> None:
        """A call of a wrapper's own."""
        self.recorder.note(
            "collective",
            operation=operation,
            line=user_line(),
            group="",
            shape=None,
            elements=1,
            by_script=False,
        )

    def backward(self, call: Call) -> Notes:
        if self.in_backward:
            yield
            return
        sends = len(self.awaited) > 0
        event: Event = {}
        if self.recorder.is_watching:
            event = self.note_backward(call.argument(0, "tensors"), sends)
        self.in_backward = True
        try:
            group = "" if sends else None
            with self.recorder.inside("backward", group):
                yield
        finally:
            self.in_backward = False
        self.awaited.clear()
        self.recorder.free_since = time.monotonic()
        self.trained.pointers = {}
        is_early = self.recorder.step < FIRST_STEPS and not self.wrappers
        adds_up = is_early or IN_NO_SYNC in self.origins
        if event and (adds_up or self.origins.count(event["origin"]) > 1):
            event["gradients"] = Sample(self.trained.gradients())

    def note_backward(self, tensors: Any, sends: bool) -> Event:
        self.passes += 1
        busy = time.monotonic() - self.recorder.free_since
        if sends:
            self.note_collective("backward, which averages")
        event = self.recorder.note(
            "backward",
            line=user_line(),
            origin=user_path(),
            sends=sends,
            in_no_sync=self.is_held_back
            or any(
                not wrapper.require_backward_grad_sync
                for wrapper in self.awaited
            ),
            loss={},
            is_mean=False,
            scale=1.0,
            bits=32,
            busy=busy,
        )
        if isinstance(tensors, Tensor) and tensors.numel() == 1:
            self.note_loss(event, tensors)
        self.origins.append(event["origin"])
        if event["in_no_sync"]:
            self.origins.append(IN_NO_SYNC)
        return event

    def note_loss(self, event: Event, loss: Tensor) -> None:
        event["loss"] = Sample({"value": loss})
        event["bits"] = 8 * loss.element_size()
        if self.scaled is not None and self.scaled[1] is loss:
            loss, _, event["scale"] = self.scaled
        self.scaled = None
        event["is_mean"] = is_mean(loss.grad_fn)
        event["origin"] += f" {loss.grad_fn.name()}" if loss.grad_fn else ""

    def clip(self, call: Call) -> Notes:
        parameters = call.argument(0, "parameters")
        if self.recorder.is_watching:
            if isinstance(parameters, Tensor):
                parameters = [parameters]
            parameters = list(parameters)
            call.args = (parameters, *call.args[1:])
            call.keywords.pop("parameters", None)
            whole = filter(is_whole, parameters)
            named = {self.trained.name_of(p): p for p in whole}
            self.recorder.note(
                "clip",
                line=user_line(),
                is_scaled=self.is_scaled,
                gradients=Sample(gradients_of(named)),
            )
        yield

    def scale(self, call: Call) -> Notes:
        yield
        scaler, outputs = call.args[:2]
        is_scaled = scaler.is_enabled() and isinstance(outputs, Tensor)
        if is_scaled and self.recorder.is_watching:
            scale = scaler.get_scale()
            self.is_scaled = scale != 1
            self.scaled = (outputs, call.result, scale)

    def unscale(self, call: Call) -> Notes:
        self.is_scaled = False
        yield

    def scaler_step(self, call: Call) -> Notes:
        before = self.recorder.step
        yield
        if self.recorder.step == before:  # left out: not all is finite
            self.recorder.end_step()

    def make_optimizer(self, call: Call) -> Notes:
        yield
        self.trained.add(call.args[0])

    def zero_grad(self, call: Call) -> Notes:
        self.origins = []
        self.trained.pointers = {}
        if self.recorder.is_watching:
            self.recorder.note("zero")
        yield

    def before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self.stepping not in (None, optimizer):
            return
        self.stepping = optimizer
        if not self.recorder.is_watching:
            return
        try:
            self.step = self.facts_before(optimizer)
        except Exception as error:
            self.recorder.give_up(error)

    def facts_before(self, optimizer: Optimizer) -> Event:
        named = self.trained.parameters(optimizer)
        parameters = parameters_of(optimizer)
        ranks = self.recorder.ranks
        for parameter in named.values():
            ranks = tuple(self.ranks.get(parameter, ranks))
        facts: Event = {
            "optimizer": self.trained.numbers.get(optimizer),
            "ranks": ranks,
            "is_wrapped": len(self.numbers) > 0,
            "is_split": any(map(is_of_split_layer, parameters)),
            "is_around": self.is_around(optimizer, named),
            "trains": any(p.requires_grad for p in named.values()),
            "in_backward": self.in_backward,
            "settings": settings_of(optimizer),
            "weights": Sample(named),
            "gradients": Sample(gradients_of(named)),
            "passes": self.passes,
            "unsent": [
                name
                for name, parameter in named.items()
                if parameter.grad is not None and parameter not in self.ranks
            ],
        }
        if self.recorder.step % STEPS_BETWEEN == 0:
            facts["left_out"] = Sample(self.trained.left_out(self.wrappers))
        is_first = self.recorder.step < FIRST_STEPS
        facts["state"] = sample_of_state(optimizer, named) if is_first else {}
        searching = filter(find_unused, self.wrappers)
        facts["unused"] = [unused_bytes(wrapper) for wrapper in searching]
        return facts

    def is_around(self, optimizer: Optimizer, named: dict[str, Tensor]) -> bool:
        """Whether gradients came since the last step without their wrapper."""
        before = self.last_step.get(optimizer, 0)
        self.last_step[optimizer] = self.passes
        for parameter in named.values():
            wrapper = self.wrapper_of.get(parameter)
            if wrapper is None or parameter.grad is None:
                continue
            if self.last_forward.get(wrapper, -1) < before:
                return True
        return False

    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer is not self.stepping:
            return
        self.stepping = None
        if self.step:
            if self.step["passes"] != self.passes:  # in a closure
                named = self.trained.parameters(optimizer)
                self.step["gradients"] = Sample(gradients_of(named))
                self.step["passes"] = self.passes
            self.recorder.note("step", line=user_line(), **self.step)
            self.step = {}
        self.origins = []
        self.is_scaled = False
        self.recorder.end_step()
