"""What the compute stream of an H100 does in a step, beside forward and backward.

From NVIDIA's data sheet, and from one published trace.
"""

from instruments.cost import adamw_seconds, copy_seconds_per_byte
from instruments.flops import MEMORY_BANDWIDTH, PEAK_TFLOPS
from instruments.simulator import Copies

NAME = "H100 80GB HBM3"
PEAK = PEAK_TFLOPS[NAME]["bf16"] * 1e12
MEMORY = MEMORY_BANDWIDTH[NAME]

REACHED = 0.4
"""Of the peak, in forward and backward."""

STOLEN = 8 / 108
"""The part of compute that a message takes while it travels: of the multiprocessors
that it occupies. In the published trace of torch's DDP on two A100s (NCCL 2.17) each
all-reduce runs as 8 blocks, a multiprocessor each, of 108."""

COPIES = Copies(copy_seconds_per_byte(MEMORY), copy_seconds_per_byte(MEMORY))
"""torch's default: a gradient is copied into its bucket, its mean back out."""


def optimizer(elements: int) -> float:
    """Seconds of AdamW for so many float32 parameters."""
    return adamw_seconds(elements, MEMORY)
