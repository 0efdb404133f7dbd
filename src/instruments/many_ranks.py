"""What messages and slow ranks leave of a step's speed, simulated on many ranks."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from instruments.network import Network
from instruments.scaling import scaling_efficiency
from instruments.simulator import (
    NO_COPIES,
    AllReduce,
    Copies,
    Layer,
    expected_maximum,
    simulate,
)


class Wait(NamedTuple):
    """Seconds for which the link works, and for which the ranks wait for it."""

    busy: float
    left: float


def wait_of(
    layers: Sequence[Layer],
    plan: Sequence[Sequence[int]],
    all_reduce: AllReduce,
    stolen: float = 0.0,
    copies: Copies = NO_COPIES,
) -> Wait:
    """Of a step whose gradients travel by a plan, as soon as backward has them."""
    sizes = [size for layer in layers for size in layer.gradient_bytes]
    messages = [sum(sizes[i] for i in bucket) for bucket in plan]
    busy = sum(all_reduce(size) for size in messages)
    step = simulate(layers, all_reduce, plan, stolen=stolen, copies=copies)
    return Wait(busy, step.exposed)


def efficiency(
    layers: Sequence[Layer],
    plan: Sequence[Sequence[int]],
    nodes: Network,
    world_size: int,
    spread: float,
    stolen: float = 0.0,
    copies: Copies = NO_COPIES,
    optimizer: float = 0.0,
) -> float:
    """Scaling efficiency, from 0 to 1, where ranks differ in speed.

    A rank's compute is drawn anew in each step: a usual one, and a delay from an
    exponential distribution with the mean `spread` of all. The step waits for the
    slowest rank. The seed is fixed.
    """

    def all_reduce(size: float) -> float:
        return nodes.all_reduce_seconds(size, world_size)

    def compute(generator: np.random.Generator, count: int) -> np.ndarray:
        return 1 - spread + spread * generator.exponential(size=count)

    slowest = expected_maximum(compute, world_size)
    step = simulate(
        layers,
        all_reduce,
        plan,
        slowest=slowest,
        stolen=stolen,
        copies=copies,
        optimizer=optimizer,
    )
    return scaling_efficiency(step.compute, step.seconds)
