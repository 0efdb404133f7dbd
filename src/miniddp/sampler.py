"""Which samples each rank reads: equal shares to train on, exact shares to evaluate on."""

import math
from collections.abc import Iterator, Sequence, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler


def shard(
    length: int, world_size: int, rank: int, contiguous: bool = False, drop_last: bool = False
) -> range:
    """The positions, out of `length`, that belong to `rank`.

    Strided: every `world_size`-th, from `rank` on. Contiguous: one block per rank. All shards
    together hold every position once, and their lengths differ by one at most; with `drop_last`
    the end of the data is left out where that makes them equal.

    Raises `ValueError` for a negative length, a world size below 1 or a rank outside it.
    """
    if length < 0:
        raise ValueError(f"length must be at least 0, not {length}")
    check_rank(rank, world_size)
    if drop_last:
        length -= length % world_size
    if contiguous:
        return range(length * rank // world_size, length * (rank + 1) // world_size)
    return range(rank, length, world_size)


def epoch_order(length: int, shuffle: bool, seed: int, epoch: int) -> list[int]:
    """All positions in the order of one epoch; it depends on the arguments alone."""
    if not shuffle:
        return list(range(length))
    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(length, generator=generator).tolist()


def equalise(order: Sequence[int], world_size: int, drop_last: bool) -> list[int]:
    """Make the length a multiple of `world_size`: drop the end or repeat from the start."""
    if drop_last:
        return list(order[: len(order) - len(order) % world_size])
    total = math.ceil(len(order) / world_size) * world_size
    repeats = math.ceil(total / len(order)) if order else 0
    return (list(order) * repeats)[:total]


class DistributedSampler(Sampler[int]):
    """The indices of `torch.utils.data.DistributedSampler`, and a state to resume from mid-epoch.

    All ranks read the same number of samples, so that none waits for another: without `drop_last`
    some samples are read twice. Call `set_epoch` before each epoch for another shuffle.

    Raises `ValueError` for a rank outside the world and for a dataset that leaves an empty shard.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.dataset = dataset
        self.num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        self.rank = dist.get_rank() if rank is None else rank
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self.consumed = 0
        self._start = 0
        check_rank(self.rank, self.num_replicas)
        if len(self) == 0:
            raise ValueError(
                f"an empty shard: the dataset has {len(dataset)} samples for "
                f"{self.num_replicas} ranks (drop_last={drop_last})"
            )

    def __len__(self) -> int:
        """Samples per rank in a whole epoch, also after a resume in the middle of one."""
        length = len(self.dataset)
        if self.drop_last:
            return length // self.num_replicas
        return math.ceil(length / self.num_replicas)

    @property
    def num_samples(self) -> int:
        """Samples per rank in an epoch."""
        return len(self)

    @property
    def total_size(self) -> int:
        """Samples of all ranks in an epoch, repeated ones included."""
        return len(self) * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        """Start the epoch, or go on where `load_state_dict` says, once."""
        order = epoch_order(len(self.dataset), self.shuffle, self.seed, self.epoch)
        order = equalise(order, self.num_replicas, self.drop_last)
        mine = [order[position] for position in shard(len(order), self.num_replicas, self.rank)]
        self.consumed, self._start = self._start, 0
        return self._count(mine[self.consumed :])

    def _count(self, indices: Sequence[int]) -> Iterator[int]:
        for index in indices:
            self.consumed += 1
            yield index

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch's shuffle. The epoch that a loaded state is from keeps its position."""
        if epoch != self.epoch:
            self.epoch = epoch
            self.consumed = self._start = 0

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """The place in the data, to save after a step; every rank may save or load the same one.

        `consumed` is how many samples of this epoch this rank has trained on. By default it is how
        many the iterator has given out. That is the same in a `DataLoader` without workers. Workers
        are handed batches ahead of the training loop: count yourself then, and pass
        `batches_done * batch_size`.
        """
        consumed = self.consumed if consumed is None else min(consumed, len(self))
        return {"epoch": self.epoch, "consumed": consumed, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state: the next iteration starts after the consumed samples.

        Raises `ValueError` if the state is of other data, another world size or another shuffle.
        """
        expected = {"epoch", "consumed", *self._identity()}
        if set(state) != expected:
            raise ValueError(f"a sampler's state has {sorted(expected)}, not {sorted(state)}")
        for name, value in self._identity().items():
            if state[name] != value:
                raise ValueError(
                    f"the state was saved with {name}={state[name]}, now it is {value}"
                )
        if not 0 <= state["consumed"] <= len(self):
            raise ValueError(f"consumed must be in 0..{len(self)}, not {state['consumed']}")
        self.epoch = state["epoch"]
        self.consumed = self._start = state["consumed"]

    def _identity(self) -> dict[str, int | bool]:
        """What the order of the indices depends on beside the epoch."""
        return {
            "length": len(self.dataset),
            "num_replicas": self.num_replicas,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "drop_last": self.drop_last,
        }


class EvaluationSampler(Sampler[int]):
    """Every sample exactly once over all ranks: nothing repeated, nothing dropped.

    The shards' lengths differ by one at most, and some are empty if there are more ranks than
    samples. So let no rank wait for another in each batch: add up per rank and reduce once at the
    end. Raises `ValueError` for a rank outside the world and for an empty dataset.
    """

    def __init__(
        self, dataset: Sized, num_replicas: int | None = None, rank: int | None = None
    ) -> None:
        num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        rank = dist.get_rank() if rank is None else rank
        if len(dataset) == 0:
            raise ValueError("an empty dataset has nothing to evaluate")
        self.positions = shard(len(dataset), num_replicas, rank)

    def __len__(self) -> int:
        return len(self.positions)

    def __iter__(self) -> Iterator[int]:
        return iter(self.positions)


def check_rank(rank: int, world_size: int) -> None:
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, not {world_size}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in 0..{world_size - 1}, not {rank}")


def check_equal_steps(steps: int, process_group: dist.ProcessGroup | None = None) -> None:
    """Raise `ValueError` on every rank unless all ranks are to take the same number of steps.

    Call it before an epoch, for example with `len(loader)`: a rank with a step more would wait
    in that step's all-reduce for ranks that have gone on.
    """
    counts = [0] * dist.get_world_size(process_group)
    dist.all_gather_object(counts, steps, group=process_group)
    if len(set(counts)) > 1:
        numbers = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts))
        raise ValueError(
            f"the ranks would take different numbers of steps ({numbers}): "
            "give every rank as many batches, as DistributedSampler does"
        )
