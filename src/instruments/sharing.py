"""What a step costs on ranks that share a machine: the cores, and the messages.

Every rank has one thread, so that a core plays the part of a GPU. A step is taken

- *alone*: by rank 0, while the other ranks wait at a barrier;
- *together*: by all ranks at once, each for itself, without a message;
- with *ddp*: by all ranks at once, which average their gradients.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from instruments.clock import clock, slowest
from instruments.models import equal_layers
from instruments.simulator import AllReduce, even_layers, simulate
from miniddp import DistributedDataParallel

WARM_UP_ROUNDS = 2


@dataclass(frozen=True)
class Shared:
    """Seconds of the slowest rank in the fastest round of a batch per rank.

    `backward` belongs to `alone`.
    """

    batch: int
    alone: float
    backward: float
    together: float
    ddp: float


@dataclass(frozen=True)
class Model:
    """`layers` equal linear layers, whose gradients DDP sends in buckets."""

    width: int
    layers: int
    bucket_mib: float

    def build(self) -> nn.Module:
        return equal_layers(self.width, self.layers)

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.build().parameters())


@dataclass(frozen=True)
class Sweep:
    """A model's steps by the batch per rank, and the bytes of DDP's buckets."""

    model: Model
    steps: dict[int, Shared]
    bucket_bytes: list[int]


def measure(rank: int, model: Model, batches: Sequence[int], rounds: int) -> Sweep:
    """The three steps take turns in every round; the fastest round of each counts.

    Whatever else runs on the machine can only add time.
    """
    torch.set_num_threads(1)
    plain = model.build()
    ddp = DistributedDataParallel(model.build(), bucket_cap_mb=model.bucket_mib)
    of_plain = torch.optim.SGD(plain.parameters(), lr=1e-3)
    of_ddp = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    steps = {}
    for batch in batches:
        inputs = torch.randn(batch, model.width)
        taken = []
        for _ in range(WARM_UP_ROUNDS + rounds):
            dist.barrier()
            alone = Step(0.0, 0.0)
            if rank == 0:
                alone = step(plain, of_plain, inputs)
            dist.barrier()
            together = step(plain, of_plain, inputs)
            dist.barrier()
            with_messages = step(ddp, of_ddp, inputs)
            taken.append(
                [
                    slowest(alone.seconds),
                    slowest(alone.backward),
                    slowest(together.seconds),
                    slowest(with_messages.seconds),
                ]
            )
        fastest = [min(column) for column in zip(*taken[WARM_UP_ROUNDS:], strict=True)]
        steps[batch] = Shared(batch, *fastest)
    buckets = [bucket.buffer().nbytes for bucket in ddp.reducer.buckets]
    return Sweep(model, steps, buckets)


class Step(NamedTuple):
    """Seconds of a training step, and those of its backward pass."""

    seconds: float
    backward: float


def step(module: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor) -> Step:
    start = clock()
    optimizer.zero_grad()
    loss = module(inputs).square().mean()
    forward_end = clock()
    loss.backward()
    backward_end = clock()
    optimizer.step()
    return Step(clock() - start, backward_end - forward_end)


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step if messages hide behind backward, and if none of them does."""

    hidden: float
    exposed: float


def predict(shared: Shared, bucket_bytes: Sequence[int], link: AllReduce) -> Prediction:
    """From the step of one rank alone, and its backward part, to that of all."""
    forward = shared.alone - shared.backward
    layers = even_layers(bucket_bytes, forward, shared.backward)
    hidden = simulate(layers, link)
    return Prediction(hidden.seconds, hidden.compute + hidden.communication)
