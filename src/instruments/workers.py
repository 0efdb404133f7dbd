"""The random numbers that the workers of a rank's loader draw."""

from collections.abc import Callable

import torch
from torch.utils.data import DataLoader, Dataset

from miniddp import DistributedSampler, set_seed


class Noise(Dataset[float]):
    """Eight samples. Each is a random number, drawn when a worker makes it."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        return torch.rand(()).item()


def draw(
    rank: int, seed: int, make_generator: Callable[[int], torch.Generator] | None
) -> list[float]:
    """What two workers draw for this rank, which has set `seed`.

    The loader gets the generator that `make_generator(rank)` makes, or none.
    """
    set_seed(seed)
    loader = DataLoader(
        Noise(),
        batch_size=None,
        sampler=DistributedSampler(Noise(), shuffle=False),
        num_workers=2,
        multiprocessing_context="fork",
        generator=make_generator(rank) if make_generator else None,
    )
    return list(loader)
