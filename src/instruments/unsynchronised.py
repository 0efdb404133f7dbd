"""A benchmark that measures no communication, beside one that does."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from finetune.training_step import train_step
from instruments.clock import clock
from instruments.replicas import spread
from miniddp import SimpleDDP

Batch = dict[str, Tensor]


class Benchmark(NamedTuple):
    """Median seconds of a step; the largest difference of a weight between ranks."""

    seconds: float
    spread: float


def with_and_without(
    model: nn.Module, other: nn.Module, batches: Sequence[Batch], rounds: int
) -> tuple[Benchmark, Benchmark]:
    """Train two equal models: as it is done, and with the synchronisation switched off.

    They take turns in each round. Every rank calls it with batches of its own. The
    second loop calls `sync_gradients` too, which does nothing there.
    """
    models = [SimpleDDP(model), SimpleDDP(other)]
    models[1].disable_grad_sync()
    optimizers = [torch.optim.AdamW(ddp.parameters(), lr=1e-3) for ddp in models]
    seconds: list[list[float]] = [[], []]
    for _ in range(rounds):
        for ddp, optimizer, taken in zip(models, optimizers, seconds, strict=True):
            dist.barrier()
            start = clock()
            for batch in batches:
                train_step(ddp, optimizer, [batch])
            taken.append((clock() - start) / len(batches))
    synchronised, apart = (
        Benchmark(statistics.median(taken), spread(ddp))
        for ddp, taken in zip(models, seconds, strict=True)
    )
    return synchronised, apart
