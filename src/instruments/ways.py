"""A step as each chapter of the book leaves it, simulated and measured."""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from instruments.clock import clock, slowest
from instruments.models import equal_layers
from instruments.network import fit_table
from instruments.simulator import (
    NO_COPIES,
    AllReduce,
    Copies,
    Layer,
    Step,
    buckets,
    simulate,
)
from miniddp import DistributedDataParallel
from miniddp.bucket import MIB

PER_PARAMETER = "a message per parameter"
FLAT = "one flat message"
OVERLAPPED = "buckets during backward"
MICRO_BATCHES = 4
ACCUMULATED = f"accumulation of {MICRO_BATCHES}"

WARM_UP_ROUNDS = 2
BURST = 8
"""All-reduces in a row, as a step sends them."""


def simulated_ways(
    layers: Sequence[Layer],
    link: AllReduce,
    cap_bytes: int,
    first_cap_bytes: int,
    stolen: float = 0.0,
    copies: Copies = NO_COPIES,
    optimizer: float = 0.0,
) -> dict[str, Step]:
    """The step with each way to average.

    A flat message and buckets are filled and emptied at the cost of `copies`. A message
    per parameter is the gradient itself.
    """
    count = sum(len(layer.gradient_bytes) for layer in layers)
    one_message = [list(reversed(range(count)))]
    plan = buckets(layers, cap_bytes, first_cap_bytes)
    steps = {
        PER_PARAMETER: partial(simulate, overlapped=False),
        FLAT: partial(simulate, plan=one_message, overlapped=False, copies=copies),
        OVERLAPPED: partial(simulate, plan=plan, stolen=stolen, copies=copies),
        ACCUMULATED: partial(
            simulate,
            plan=plan,
            stolen=stolen,
            copies=copies,
            micro_batches=MICRO_BATCHES,
        ),
    }
    return {
        name: step(layers, link, optimizer=optimizer) for name, step in steps.items()
    }


def per_micro_batch(way: str, seconds: float) -> float:
    return seconds / MICRO_BATCHES if way == ACCUMULATED else seconds


# Measured


class Taken(NamedTuple):
    """Seconds of the slowest rank, and the processor time of this one."""

    seconds: float
    busy: float


@dataclass(frozen=True)
class Bench:
    """Equal layers, each a square `nn.Linear` and a ReLU, on ranks with a core each."""

    width: int
    layers: int
    batch: int
    cap_mib: int
    rounds: int

    def build(self) -> nn.Module:
        return equal_layers(self.width, self.layers)


@dataclass(frozen=True)
class Measured:
    """What a bench took, in the fastest of its rounds.

    Attributes:
        bench: What was measured.
        ways: Seconds of a step by way.
        forward: Seconds of a rank's forward, while the other computes too.
        compute: The same of forward and backward.
        packing: Seconds to fill and empty the flat message.
        all_reduces: Seconds by the bytes of the tensor.
        share_of_core: The part of a core that an all-reduce keeps busy, by the bytes.
    """

    bench: Bench
    ways: dict[str, float]
    forward: float
    compute: float
    packing: float
    all_reduces: dict[int, float]
    share_of_core: dict[int, float]

    @property
    def stolen(self) -> float:
        """What a bucket takes of the compute while it travels, from 0 to 1."""
        return min(1.0, self.share_of_core[self.bench.cap_mib * MIB])

    def simulated(self, world_size: int) -> dict[str, Step]:
        """The same ways, from the compute, the link and the packing."""
        width = self.bench.width
        count = self.bench.layers
        backward = self.compute - self.forward
        layer = Layer(
            self.forward / count, backward / count, [4 * width * width, 4 * width]
        )
        sizes = list(self.all_reduces)
        times = list(self.all_reduces.values())
        link = fit_table(sizes, times, world_size).all_reduce_seconds
        cap = self.bench.cap_mib * MIB
        layers = [layer] * count
        gradient_bytes = sum(sum(layer.gradient_bytes) for layer in layers)
        half = self.packing / 2 / gradient_bytes
        copies = Copies(filling=half, emptying=half)
        return simulated_ways(layers, link, cap, cap, self.stolen, copies)


def measure_ways(rank: int, bench: Bench) -> Measured:
    """Take every step, and every all-reduce that it sends, in turn.

    All of it takes its turn in every round, and the fastest round counts: whatever else
    runs on the machine can only add time.
    """
    torch.set_num_threads(1)
    plain = bench.build()
    ddp = DistributedDataParallel(bench.build(), bucket_cap_mb=bench.cap_mib)
    inputs = torch.randn(bench.batch, bench.width)
    ways: dict[str, Callable[[], object]] = {
        PER_PARAMETER: lambda: step(plain, inputs, one_message_each),
        FLAT: lambda: step(plain, inputs, one_flat_message),
        OVERLAPPED: lambda: step(ddp, inputs),
        ACCUMULATED: lambda: accumulate(ddp, inputs),
    }
    alone: dict[str, Callable[[], object]] = {
        "forward": lambda: plain(inputs),
        "compute": lambda: step(plain, inputs),
        "packing": lambda: one_flat_message(plain, send=False),
    }
    links: dict[int, Callable[[], object]] = {
        num_bytes: _burst(torch.zeros(num_bytes // 4))
        for num_bytes in _message_bytes(plain, bench)
    }
    work: dict[Any, Callable[[], object]] = {**ways, **alone, **links}
    taken: dict[Any, list[Taken]] = {name: [] for name in work}
    for _ in range(WARM_UP_ROUNDS + bench.rounds):
        for name, act in work.items():
            taken[name].append(_timed(act))
    fastest = {name: min(rounds[WARM_UP_ROUNDS:]) for name, rounds in taken.items()}
    return Measured(
        bench=bench,
        ways={name: fastest[name].seconds for name in ways},
        forward=fastest["forward"].seconds,
        compute=fastest["compute"].seconds,
        packing=fastest["packing"].seconds,
        all_reduces={size: fastest[size].seconds / BURST for size in links},
        share_of_core={
            size: fastest[size].busy / fastest[size].seconds for size in links
        },
    )


def step(
    model: nn.Module,
    inputs: Tensor,
    average: Callable[[nn.Module], object] | None = None,
) -> None:
    """Forward, backward, and then what averages the gradients, if backward does not."""
    model(inputs).square().mean().backward()
    if average is not None:
        average(model)


def accumulate(ddp: DistributedDataParallel, inputs: Tensor) -> None:
    """Micro-batches of which the last one sends."""
    for number in range(1, MICRO_BATCHES + 1):
        with nullcontext() if number == MICRO_BATCHES else ddp.no_sync():
            step(ddp, inputs)


def one_message_each(model: nn.Module) -> None:
    """Average each gradient by itself, the last one first."""
    for gradient in reversed(gradients(model)):
        dist.all_reduce(gradient.div_(dist.get_world_size()))


def one_flat_message(model: nn.Module, send: bool = True) -> None:
    """Average all gradients in one message; or only fill and empty it."""
    grads = gradients(model)
    flat = torch.cat([grad.flatten() for grad in grads])
    flat /= dist.get_world_size()
    if send:
        dist.all_reduce(flat)
    means = torch.split(flat, [grad.numel() for grad in grads])
    for grad, mean in zip(grads, means, strict=True):
        grad.copy_(mean.view_as(grad))


def gradients(model: nn.Module) -> list[Tensor]:
    return [
        parameter.grad for parameter in model.parameters() if parameter.grad is not None
    ]


def _message_bytes(model: nn.Module, bench: Bench) -> list[int]:
    """The sizes of tensors that some way sends."""
    sizes = [parameter.nbytes for parameter in model.parameters()]
    return list(dict.fromkeys([*sizes, bench.cap_mib * MIB, sum(sizes)]))


def _burst(tensor: Tensor) -> Callable[[], object]:
    def all_reduces() -> None:
        for _ in range(BURST):
            dist.all_reduce(tensor)

    return all_reduces


def _timed(work: Callable[[], object]) -> Taken:
    dist.barrier()
    busy = time.process_time()
    start = clock()
    work()
    seconds = clock() - start
    busy = time.process_time() - busy
    return Taken(slowest(seconds), busy)
