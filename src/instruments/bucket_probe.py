"""What a communication hook sees of the buckets: when they leave, and their memory."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.futures import Future

from instruments.held import storage_bytes
from miniddp.hooks import allreduce_hook

Wrap = Callable[[nn.Module], Any]
"""Makes the DDP of a module: torch's class or miniddp's, with its options."""

LossOf = Callable[[nn.Module], Tensor]
"""A forward pass, and its loss."""


class Departure(NamedTuple):
    """A bucket that is sent: its bytes, and the gradients that are there by then."""

    num_bytes: int
    gradients: int


class Probe:
    """Notes each departure: a communication hook, beside hooks of the parameters.

    They come first if the probe is made before the module is wrapped.
    """

    def __init__(self, module: nn.Module) -> None:
        self.gradients = 0
        self.departures: list[Departure] = []
        for parameter in module.parameters():
            if parameter.requires_grad:
                hooked: Any = parameter
                hooked.register_post_accumulate_grad_hook(self._count)

    def _count(self, _: Tensor) -> None:
        self.gradients += 1

    def hook(self, state, bucket):  # type: ignore[no-untyped-def]  # torch checks types
        departure = Departure(bucket.buffer().nbytes, self.gradients)
        self.departures.append(departure)
        mean: Future[Tensor] = allreduce_hook(state, bucket)
        return mean

    def start_over(self) -> None:
        self.gradients = 0
        self.departures = []


def departures_by_step(
    module: nn.Module, wrap: Wrap, loss_of: LossOf, steps: int
) -> list[list[Departure]]:
    """What leaves in each of some steps. Every rank calls it."""
    probe = Probe(module)
    ddp = wrap(module)
    ddp.register_comm_hook(None, probe.hook)
    found = []
    for _ in range(steps):
        probe.start_over()
        loss_of(ddp).backward()
        found.append(probe.departures)
    return found


def bytes_held(ddp: Any, loss_of: LossOf) -> int:
    """The bytes behind all gradients and all buckets after the second backward pass.

    Memory that a gradient shares with its bucket counts once. Every rank calls it.
    """
    buffers: list[Tensor] = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch checks types
        buffers.append(bucket.buffer())
        return allreduce_hook(state, bucket)

    ddp.register_comm_hook(None, hook)
    for _ in range(2):
        buffers.clear()
        loss_of(ddp).backward()
    gradients = [parameter.grad for parameter in ddp.parameters()]
    return storage_bytes([*buffers, *gradients])


def ready_order(module: nn.Module, loss_of: LossOf) -> list[int]:
    """The parameters, by number, in the order in which backward has their gradients."""
    numbers = {parameter: i for i, parameter in enumerate(module.parameters())}
    order: list[int] = []

    def note(parameter: nn.Parameter) -> None:
        order.append(numbers[parameter])

    for parameter in module.parameters():
        hooked: Any = parameter
        hooked.register_post_accumulate_grad_hook(note)
    loss_of(module).backward()
    return order


def leaves_after(plan: Sequence[Sequence[int]], ready: Sequence[int]) -> list[int]:
    """For each bucket of a plan, the number of gradients that are there when it leaves.

    Backward makes them in the order `ready`. A bucket waits for those before it.
    """
    moments = {i: number for number, i in enumerate(ready, 1)}
    full = [max(moments[i] for i in bucket) for bucket in plan]
    return list(accumulate(full, max))
