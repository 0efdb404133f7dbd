"""A solution of exercise 12."""

from collections.abc import Sequence

import torch
from torch import Tensor


def noise_scale(gradients: Sequence[Sequence[Tensor]], batch_size: int) -> float:
    steps = torch.stack([torch.stack(list(ranks)) for ranks in gradients]).double()
    joined_size = steps.shape[1] * batch_size
    small = steps.square().sum(2).mean().item()
    large = steps.mean(1).square().sum(1).mean().item()
    variance = (small - large) / (1 / batch_size - 1 / joined_size)
    length = small - variance / batch_size
    return variance / length if length > 0 else float("inf")


def learning_rate(
    step: int,
    base_rate: float,
    base_batch: int,
    batch: int,
    warmup_steps: int,
    optimizer: str,
) -> float:
    powers = {"sgd": 1.0, "adam": 0.5}
    if optimizer not in powers:
        raise ValueError(f"no rule for {optimizer!r}")
    target = base_rate * (batch / base_batch) ** powers[optimizer]
    if step >= warmup_steps:
        return target
    return base_rate + (target - base_rate) * step / warmup_steps
