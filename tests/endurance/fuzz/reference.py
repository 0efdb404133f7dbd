"""What is right: one process that runs all ranks side by side and takes the mean itself."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .loop import Trace
from .model import Spec
from .program import program

SENT = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""By communication hook; without one, gradients are sent as they are."""


class Alone(nn.Module):
    """In the place of a wrapper: it has its methods, and does nothing."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)


def reference(spec: Spec) -> list[Trace]:
    """The trace of each rank."""
    ranks = [program(spec, rank, Alone, lambda _: None) for rank in range(spec["ranks"])]
    at_start, in_forward = buffer_sync(spec)
    copies_next = True
    while True:
        traces: list[Trace] = []
        events = []
        for rank in ranks:
            try:
                events.append(next(rank))
            except StopIteration as end:
                traces.append(end.value)
        if traces:
            return traces
        what, _, sync = events[0]
        nets = [net for _, net, _ in events]
        if what == "start" and spec.get("init sync", True):
            copy_first([list(net.parameters()) for net in nets])
            if at_start:
                copy_first([list(net.buffers()) for net in nets])
        elif what == "forward":
            if in_forward and copies_next:
                copy_first([list(net.buffers()) for net in nets])
            copies_next = sync
        elif what == "average":
            average(nets, SENT.get(spec.get("comm hook", "")))


def buffer_sync(spec: Spec) -> tuple[bool, bool]:
    """Whether buffers are copied at the start, and in forward."""
    broadcast = spec.get("broadcast buffers", True)
    if "forward sync buffers" in spec:
        return True, spec["forward sync buffers"]
    return broadcast, broadcast


@torch.no_grad()
def copy_first(replicas: Sequence[Sequence[Tensor]]) -> None:
    for first, *others in zip(*replicas, strict=True):
        for other in others:
            if other.shape != first.shape:
                raise ValueError("tensors that differ in shape cannot be copied")
            once = tuple(slice(None if stride else 1) for stride in other.stride())
            other.data[once].copy_(first[once])  # each element of an expanded tensor once


@torch.no_grad()
def average(nets: Sequence[nn.Module], sent: torch.dtype | None) -> None:
    """Take the mean of the gradients, rounded to what is `sent`."""
    for parameters in same_parameters(nets):
        gradients = [p.grad for p in parameters]
        if not parameters[0].requires_grad or all(g is None for g in gradients):
            continue
        dense = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        numbers = torch.stack(dense)
        if sent is not None and not numbers.is_complex():
            numbers = numbers.to(sent)
        mean = (numbers / len(nets)).sum(0).to(dense[0].dtype)
        for p in parameters:
            p.grad = mean.clone() if p.grad is None else p.grad.copy_(mean)


def same_parameters(nets: Sequence[nn.Module]) -> Iterator[tuple[nn.Parameter, ...]]:
    return zip(*[list(net.parameters()) for net in nets], strict=True)
