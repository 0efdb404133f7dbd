"""A training of sentence pairs under the profiler, whose ranks may load slowly."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from finetune.data import collate
from finetune.training_step import WRAPPERS, train_step
from instruments.profiling import Profiler, region

STEPS = 13
"""The schedule of the profiler records the last five."""


@dataclass(frozen=True)
class Loader:
    """The encoded pairs, dealt out to the ranks step by step, again and again."""

    encoded: Any
    tokenizer: Any
    world_size: int
    pairs_per_rank: int

    def batch(self, step: int, rank: int) -> dict[str, Tensor]:
        """The pairs of one rank in one step."""
        first = (step * self.world_size + rank) * self.pairs_per_rank
        numbers = range(first, first + self.pairs_per_rank)
        pairs = [self.encoded[number % len(self.encoded)] for number in numbers]
        return collate(pairs, self.tokenizer)


def profiled_training(
    rank: int,
    folder: Path,
    build: Callable[[], nn.Module],
    loader: Loader,
    wrapper: str,
    load_seconds: Sequence[float],
) -> Path:
    """Train; returns this rank's trace, which stands in the folder.

    Each rank sleeps for its part of `load_seconds` while it loads a batch.
    """
    module = build()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    model = WRAPPERS[wrapper](module)
    with Profiler(folder, all_ranks=True) as profiler:
        for number in range(STEPS):
            with region("load_batch"):
                batch = loader.batch(number, rank)
                time.sleep(load_seconds[rank])
            train_step(model, optimizer, [batch])
            profiler.step()
    return profiler.traces[0]
