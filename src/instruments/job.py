"""Chapter 11's job: the largest SmolLM2 on nodes of eight H100, computed."""

from typing import NamedTuple

from instruments import h100
from instruments.h100 import PEAK, REACHED
from instruments.memory import (
    activation_bytes,
    bucket_bytes,
    bytes_per_parameter,
    cast_bytes,
    logit_bytes,
)
from instruments.network import NODES, Network, gpu_node
from instruments.scaling import scaling_efficiency
from instruments.simulator import NO_COPIES, Copies, Step, buckets, simulate
from instruments.tensors import MODELS, Llama, compute_seconds, layers
from miniddp.bucket import MIB

MODEL = MODELS["smollm2-1.7b"]
TOKENS = 4096
"""In a step of each GPU."""

DATA = 34e9
"""Tokens to train on."""

COMPUTE = compute_seconds(MODEL, TOKENS, REACHED * PEAK)
"""Seconds of forward and backward."""

OPTIMIZER = h100.optimizer(MODEL.elements)
LAYERS = layers(MODEL, COMPUTE)
GRADIENT_BYTES = 4 * MODEL.elements
EIGHT_CARDS = NODES["DGX H100"]
ONE_CARD = gpu_node(450e9, 100e9 / 8, cards=1, hop=25e-6)


def step(
    gpus: int,
    nodes: Network,
    cap: int = 25 * MIB,
    sent: int = 4,
    batches: int = 1,
    views: bool = False,
) -> Step:
    """A step of `gpus` GPUs in which each gradient travels as `sent` bytes.

    With `views` it is a view of its bucket, so that no mean is copied back.
    """

    def all_reduce(size: float) -> float:
        return nodes.all_reduce_seconds(size * sent / 4, gpus)

    return simulate(
        LAYERS,
        all_reduce,
        plan(cap),
        micro_batches=batches,
        stolen=h100.STOLEN,
        copies=h100.COPIES._replace(emptying=0) if views else h100.COPIES,
        optimizer=OPTIMIZER,
    )


class Losses(NamedTuple):
    """Seconds by which a step is longer than on one rank alone, by their cause.

    Attributes:
        messages: What backward does not hide of them.
        multiprocessors: What they take of compute, as they travel.
        copies: Into the buckets and back.
    """

    messages: float
    multiprocessors: float
    copies: float


def losses(gpus: int, nodes: Network) -> Losses:
    """One cause after the other is added to a step."""

    def longer(stolen: float, copies: Copies) -> float:
        made = simulate(
            LAYERS,
            lambda size: nodes.all_reduce_seconds(size, gpus),
            plan(25 * MIB),
            stolen=stolen,
            copies=copies,
            optimizer=OPTIMIZER,
        )
        return made.exposed

    messages = longer(0.0, NO_COPIES)
    slowed = longer(h100.STOLEN, NO_COPIES)
    everything = longer(h100.STOLEN, h100.COPIES)
    return Losses(messages, slowed - messages, everything - slowed)


def plan(cap: int) -> list[list[int]]:
    """DDP's first bucket has a cap of 1 MiB, unless you choose one."""
    first = MIB if cap == 25 * MIB else cap
    return buckets(LAYERS, cap, first)


def bucket_sizes(cap: int = 25 * MIB) -> list[int]:
    """Bytes of each bucket."""
    sizes = [size for layer in LAYERS for size in layer.gradient_bytes]
    return [sum(sizes[i] for i in bucket) for bucket in plan(cap)]


def memory(config: Llama, elements: int) -> dict[str, int]:
    """Bytes that a rank of DDP needs, in float32 under autocast.

    All gradients and all activations are counted: the first come as the second go.
    """
    each = bytes_per_parameter("adam")
    return {
        "parameters": each.parameters * elements,
        "gradients": each.gradients * elements,
        "buckets": bucket_bytes(elements, each.gradients, views=False),
        "AdamW's moments": each.optimizer * elements,
        "activations": activation_bytes(config, TOKENS),
        "casts of the weights": cast_bytes(config, elements),
        "logits": logit_bytes(config.vocab_size, TOKENS),
    }


def hours(gpus: int, job: Step) -> float:
    """Until all tokens are read."""
    return DATA / (gpus * TOKENS) * job.seconds / 3600


def efficiency(job: Step) -> float:
    """In per cent."""
    return 100 * scaling_efficiency(job.compute, job.seconds)
