"""A training step in time, before anybody has a cluster.

A rank computes on one stream and communicates on another. All ranks do the same at the
same time, so one of them stands for all. What the link costs is a function of the
caller: any callable that gives the seconds of an all-reduce of so many bytes, a
model's or a table's.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from instruments.cost import check_amounts, check_counts
from miniddp.bucket import MIB, plan_buckets

COMPUTE = "compute"
COMMUNICATION = "communication"

AllReduce = Callable[[float], float]
"""Seconds in which the ranks all-reduce so many bytes."""

Draw = Callable[[np.random.Generator, int], np.ndarray]
"""So many draws from a distribution, such as `np.random.Generator.standard_normal`."""


class Span(NamedTuple):
    """What a stream does from `start` to `end`, in seconds since the step began."""

    stream: str
    name: str
    start: float
    end: float


class Copies(NamedTuple):
    """What a bucket costs the compute stream: seconds for each byte of gradients.

    Attributes:
        filling: To copy a gradient into its bucket, when backward has made it.
        emptying: To copy the mean back out, when the bucket has arrived; 0 where
            gradients are views of their bucket (`gradient_as_bucket_view=True`).
    """

    filling: float = 0.0
    emptying: float = 0.0


NO_COPIES = Copies()


class Layer(NamedTuple):
    """What a layer does in a micro-batch: seconds of both passes, bytes of gradients.

    Autograd has all gradients of a layer when its backward ends.
    """

    forward: float
    backward: float
    gradient_bytes: Sequence[int]


@dataclass(frozen=True)
class Step:
    """A step.

    Attributes:
        spans: The timeline: what each stream did, and when.
        compute: Seconds for which a rank alone would compute, the optimizer's included.
    """

    spans: tuple[Span, ...]
    compute: float

    @property
    def seconds(self) -> float:
        """When both streams are done."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def exposed(self) -> float:
        """Seconds by which the step is longer than a rank alone would need."""
        return max(0.0, self.seconds - self.compute)

    @property
    def communication(self) -> float:
        """Seconds for which the link was in use."""
        messages = [span for span in self.spans if span.stream == COMMUNICATION]
        return sum(message.end - message.start for message in messages)


class Streams:
    """What the two streams of a rank have done so far, and until when each is busy."""

    def __init__(self, stolen: float) -> None:
        self.stolen = stolen
        self.spans: list[Span] = []
        self.computed = 0.0
        self.arrived = 0.0

    def compute(self, name: str, seconds: float) -> None:
        """Compute next what takes `seconds` while nothing travels."""
        travelling = max(0.0, self.arrived - self.computed)
        slowed = travelling * self.stolen
        if seconds < travelling - slowed:  # done before all that was sent has arrived
            slowed = seconds * self.stolen / (1 - self.stolen)
        start = self.computed
        self.computed = start + seconds + slowed
        self.spans.append(Span(COMPUTE, name, start, self.computed))

    def send(self, name: str, seconds: float) -> float:
        """Send what has been computed by now, as soon as the link is free.

        Returns when it has arrived.
        """
        check_amounts(**{f"seconds of {name}": seconds})
        start = max(self.computed, self.arrived)
        self.arrived = start + seconds
        self.spans.append(Span(COMMUNICATION, name, start, self.arrived))
        return self.arrived

    def wait(self, arrival: float) -> None:
        """Compute nothing until then."""
        self.computed = max(self.computed, arrival)


def simulate(
    layers: Sequence[Layer],
    all_reduce: AllReduce,
    plan: Sequence[Sequence[int]] | None = None,
    *,
    overlapped: bool = True,
    micro_batches: int = 1,
    stolen: float = 0.0,
    slowest: float = 1.0,
    copies: Copies = NO_COPIES,
    optimizer: float = 0.0,
) -> Step:
    """Simulate a step of a model whose `layers` are given in the order of forward.

    Gradients are numbered through all layers. `plan` says which of them travel
    together, and in which order (`buckets`); without it each travels alone, the last
    one first. A bucket is sent when its gradients are there and the bucket before it
    has arrived (Li et al., VLDB 2020, section 3.2). With `overlapped=False` all wait
    for the end of backward. Of several `micro_batches` the last one sends, as with
    `no_sync`.

    While a bucket travels, compute loses the part `stolen` (0 to 1) of its speed:
    NCCL's kernels occupy multiprocessors, gloo's threads cores. `slowest` is the
    compute of the slowest rank over that of a usual one (`expected_maximum`): no
    bucket leaves before that rank has its part.

    Backward copies each gradient into its bucket. After backward every bucket is waited
    for and copied back, one after the other, as torch's reducer does; then `optimizer`
    takes its seconds (`instruments.cost.adamw_seconds`).

    Raises `ValueError` for a negative amount, or a plan that does not hold every
    gradient once.
    """
    check_counts(micro_batches=micro_batches)
    sizes = _gradient_bytes(layers)
    if plan is None:
        plan = [[i] for i in reversed(range(len(sizes)))]
    _check(layers, sizes, plan, stolen, slowest)
    check_amounts(**copies._asdict(), optimizer=optimizer)
    unsent = deque(enumerate(plan))
    sent: list[tuple[float, int]] = []
    streams = Streams(stolen)

    def send_full_buckets(made_from: int) -> None:
        while unsent and all(i >= made_from for i in unsent[0][1]):
            number, bucket = unsent.popleft()
            num_bytes = sum(sizes[i] for i in bucket)
            arrival = streams.send(f"bucket {number}", all_reduce(num_bytes))
            sent.append((arrival, num_bytes))

    firsts = [0, *accumulate(len(layer.gradient_bytes) for layer in layers)]
    for number in range(1, micro_batches + 1):
        for i, layer in enumerate(layers):
            streams.compute(f"forward {i}", layer.forward * slowest)
        is_last = number == micro_batches
        for i, layer in reversed(list(enumerate(layers))):
            backward = layer.backward * slowest
            if is_last:
                backward += copies.filling * sum(layer.gradient_bytes)
            streams.compute(f"backward {i}", backward)
            if overlapped and is_last:
                send_full_buckets(firsts[i])
    send_full_buckets(0)
    for number, (arrival, num_bytes) in enumerate(sent):
        if copies.emptying:
            streams.wait(arrival)
            streams.compute(f"empty {number}", copies.emptying * num_bytes)
    if optimizer:
        streams.wait(streams.arrived)
        streams.compute("optimizer", optimizer)
    both_passes = sum(layer.forward + layer.backward for layer in layers)
    return Step(tuple(streams.spans), micro_batches * both_passes + optimizer)


def buckets(
    layers: Sequence[Layer], cap_bytes: int = 25 * MIB, first_cap_bytes: int = MIB
) -> list[list[int]]:
    """The buckets of DDP for these layers, filled from the last gradient on."""
    sizes = _gradient_bytes(layers)
    last_first = range(len(sizes))[::-1]
    kinds = [None] * len(sizes)
    return plan_buckets(sizes, kinds, last_first, cap_bytes, first_cap_bytes)


def even_layers(
    bucket_bytes: Sequence[int], forward: float, backward: float
) -> list[Layer]:
    """Layers that fill one bucket each, if compute makes as many bytes in every second.

    `bucket_bytes` stand in the order in which backward fills them; `forward` and
    `backward` are seconds of all layers together. Raises `ValueError` if there are no
    bytes at all.
    """
    total = sum(bucket_bytes)
    if total <= 0:
        raise ValueError(
            f"there must be bytes in some bucket, not {list(bucket_bytes)!r}"
        )
    layers = []
    for size in reversed(bucket_bytes):
        share = size / total
        layers.append(Layer(forward * share, backward * share, [size]))
    return layers


def expected_maximum(draw: Draw, count: int, seed: int = 0, trials: int = 200) -> float:
    """The mean over `trials` of the largest of `count` draws.

    Where `draw` gives a rank's compute, 1 for a usual one, this is that of the slowest
    of `count` ranks, for `simulate(slowest=…)`.
    """
    check_counts(count=count, trials=trials)
    generator = np.random.default_rng(seed)
    return float(np.mean([draw(generator, count).max() for _ in range(trials)]))


def _gradient_bytes(layers: Sequence[Layer]) -> list[int]:
    return [size for layer in layers for size in layer.gradient_bytes]


def _check(
    layers: Sequence[Layer],
    sizes: Sequence[int],
    plan: Sequence[Sequence[int]],
    stolen: float,
    slowest: float,
) -> None:
    check_amounts(
        stolen=stolen, slowest=slowest, smallest_gradient=min(sizes, default=0)
    )
    for i, layer in enumerate(layers):
        check_amounts(**{f"forward of layer {i}": layer.forward})
        check_amounts(**{f"backward of layer {i}": layer.backward})
    if stolen > 1:
        raise ValueError(f"stolen must be a part from 0 to 1, not {stolen!r}")
    planned = sorted(i for bucket in plan for i in bucket)
    if planned != list(range(len(sizes))):
        raise ValueError(
            f"the plan must hold each of the {len(sizes)} gradients once: {plan!r}"
        )
