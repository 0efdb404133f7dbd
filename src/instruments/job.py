"""Chapter 11's job: the largest SmolLM2 on nodes of eight H100, computed."""

from instruments.flops import PEAK_TFLOPS
from instruments.network import NODES, Network, gpu_node
from instruments.scaling import scaling_efficiency
from instruments.simulator import Step, even_layers, simulate
from miniddp.bucket import MIB

PARAMETERS = 1_700_000_000
TOKENS = 4096
"""In a step of each GPU."""

DATA = 34e9
"""Tokens to train on."""

REACHED = 0.4
"""Of the peak of a GPU."""

PEAK = PEAK_TFLOPS["H100 80GB HBM3"]["bf16"] * 1e12
COMPUTE = 6 * PARAMETERS * TOKENS / (REACHED * PEAK)
"""Seconds of forward and backward."""

GRADIENT_BYTES = 4 * PARAMETERS
EIGHT_CARDS = NODES["DGX H100"]
ONE_CARD = gpu_node(450e9, 100e9 / 8, cards=1, hop=25e-6)


def step(
    gpus: int,
    nodes: Network,
    cap: int = 25 * MIB,
    sent: int = 4,
    batches: int = 1,
) -> Step:
    """A step of `gpus` GPUs in which each gradient travels as `sent` bytes."""
    sizes = bucket_bytes(cap)
    layers = even_layers(sizes, COMPUTE / 3, COMPUTE * 2 / 3)

    def all_reduce(size: float) -> float:
        return nodes.all_reduce_seconds(size * sent / 4, gpus)

    return simulate(layers, all_reduce, micro_batches=batches)


def bucket_bytes(cap: int = 25 * MIB) -> list[int]:
    """DDP's first bucket has 1 MiB, unless you choose a size."""
    first = MIB if cap == 25 * MIB else cap
    full, last = divmod(GRADIENT_BYTES - first, cap)
    return [first, *[cap] * full, last]


def hours(gpus: int, job: Step) -> float:
    """Until all tokens are read."""
    return DATA / (gpus * TOKENS) * job.seconds / 3600


def efficiency(job: Step) -> float:
    """In per cent."""
    return 100 * scaling_efficiency(job.compute, job.seconds)
