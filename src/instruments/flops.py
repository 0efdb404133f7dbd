"""Model FLOPs utilisation: the part of the hardware's peak that training uses."""

import torch

from instruments.clock import clock
from instruments.cost import check_amounts, check_counts

PEAK_TFLOPS = {
    "H200 NVL": {"bf16": 835.5, "fp16": 835.5, "tf32": 417.5, "fp32": 60.0},
    "H200": {"bf16": 989.5, "fp16": 989.5, "tf32": 494.7, "fp32": 67.0},
    "H100 80GB HBM3": {"bf16": 989.5, "fp16": 989.5, "tf32": 494.7, "fp32": 67.0},
    "H100 PCIe": {"bf16": 756.5, "fp16": 756.5, "tf32": 378.0, "fp32": 51.0},
    "A100": {"bf16": 312.0, "fp16": 312.0, "tf32": 156.0, "fp32": 19.5},
    "V100-SXM2": {"fp16": 125.0, "fp32": 15.7},
    "T4": {"fp16": 65.0, "fp32": 8.1},
}
"""Dense peak in TFLOP/s of NVIDIA GPUs, from the data sheet of each; a sheet that gives
a figure "with sparsity" is halved. The keys are parts of what
`torch.cuda.get_device_name` says."""

MEMORY_BANDWIDTH = {"H100 80GB HBM3": 3.35e12, "A100": 2.039e12}
"""Bytes per second of a GPU's memory, from the data sheets of H100 SXM and A100 80GB
SXM."""


def training_flops(parameters: int, tokens: int) -> int:
    """6 Ψ m FLOPs for a dense transformer with Ψ parameters on m tokens.

    2 Ψ m in the forward pass, twice that in the backward pass; attention's own
    products, which grow with the length of the sequence, are left out (Kaplan et al.,
    "Scaling Laws for Neural Language Models", 2020, section 2.1).
    """
    check_counts(parameters=parameters, tokens=tokens)
    return 6 * parameters * tokens


def utilisation(flops: float, seconds: float, peak_flops: float) -> float:
    """MFU, from 0 to 1: FLOPs that the model needs over those the hardware could do.

    `peak_flops` is in FLOP/s and of all devices that share the work (Chowdhery et al.,
    "PaLM", 2022, appendix B). Raises `ValueError` for an amount that is negative, or a
    time or peak of 0.
    """
    check_amounts(flops=flops, seconds=seconds, peak_flops=peak_flops)
    if seconds == 0 or peak_flops == 0:
        raise ValueError("seconds and peak_flops must be more than 0")
    return flops / seconds / peak_flops


def peak_flops(device_name: str, precision: str = "bf16") -> float | None:
    """Peak FLOP/s of a GPU by its name; None where it is not known.

    `precision` is "bf16", "fp16", "tf32" or "fp32", the last without tensor cores. Not
    known are a CPU, an unlisted GPU, a part of a GPU (MIG) and a precision that a GPU
    has no units for.
    """
    if precision not in PEAK_TFLOPS["A100"]:
        raise ValueError(
            f"precision must be bf16, fp16, tf32 or fp32, not {precision!r}"
        )
    words = f" {device_name} ".replace("-", " ")
    if " MIG " in words:
        return None
    for name, peaks in PEAK_TFLOPS.items():
        if f" {name} ".replace("-", " ") in words:
            return peaks[precision] * 1e12 if precision in peaks else None
    return None


def measured_peak_flops(
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    size: int = 1024,
    repeats: int = 10,
) -> float:
    """FLOP/s of the fastest of several products of two `size x size` matrices.

    The peak to use for a CPU, whose data sheet says little about what its cores
    sustain.
    """
    check_counts(size=size, repeats=repeats)
    left, right = torch.randn(2, size, size, device=device, dtype=dtype)
    seconds = []
    for _ in range(repeats + 1):  # the first one warms up
        start = clock()
        torch.mm(left, right)
        seconds.append(clock() - start)
    return float(2 * size**3 / min(seconds[1:]))
