"""Streams of torch and of `datasets`, small enough to follow: who reads what?"""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import datasets
import torch
import torch.distributed as dist
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from miniddp.process import device

# Streams of torch


class Numbers(IterableDataset[int]):
    """The numbers 0 to 5. Every worker reads all of them."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


class SharedNumbers(IterableDataset[int]):
    """The numbers 0 to 5. Every worker of every rank reads its own."""

    def __init__(self, world_size: int, rank: int):
        self.world_size = world_size
        self.rank = rank

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        number = self.rank * workers + worker
        return itertools.islice(range(6), number, None, self.world_size * workers)


def read_with_two_workers(dataset: IterableDataset[int]) -> list[int]:
    """What a rank reads through a loader with two workers."""
    return list(
        DataLoader(dataset, None, num_workers=2, multiprocessing_context="fork")
    )


def while_all_have_one(batches: Iterable[Any]) -> Iterator[Any]:
    """This rank's batches until one of the ranks has none left."""
    iterator = iter(batches)
    while True:
        batch = next(iterator, None)
        has_one = torch.tensor(int(batch is not None), device=device())
        dist.all_reduce(has_one, op=dist.ReduceOp.MIN)
        if not has_one:
            return
        yield batch


# Streams of `datasets`: files of four numbers

PER_FILE = 4


def stream_of(files: int, opened: list[int] | None = None) -> datasets.IterableDataset:
    """File f holds the samples 4 f to 4 f + 3. What is opened is noted in `opened`."""

    def read(numbers: list[int]) -> Iterator[dict[str, int]]:
        for number in numbers:
            if opened is not None:
                opened.append(number)
            for place in range(PER_FILE):
                yield {"sample": PER_FILE * number + place}

    return datasets.IterableDataset.from_generator(
        read, gen_kwargs={"numbers": list(range(files))}
    )


def part_of(stream: datasets.IterableDataset, rank: int) -> datasets.IterableDataset:
    """What rank 0 or rank 1 of two ranks reads."""
    return split_dataset_by_node(stream, rank, 2)


def samples_in(stream: Iterable[dict[str, int]]) -> list[int]:
    """All samples that are left."""
    return [row["sample"] for row in stream]


def read_and_resume(
    stream: datasets.IterableDataset, epoch: int, told: int
) -> tuple[list[int], list[int]]:
    """What rank 0 reads before its state is saved, and after another has loaded it.

    It saves after three samples of an epoch. The other is `told` this epoch, or one
    that is not it.
    """
    part = part_of(stream, 0)
    part.set_epoch(epoch)
    before = samples_in(itertools.islice(part, 3))
    again = part_of(stream, 0)
    again.set_epoch(told)
    again.load_state_dict(part.state_dict())
    return before, samples_in(again)
