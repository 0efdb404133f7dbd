"""Which samples each rank reads.

To train: `DistributedSampler`, equal shares. To evaluate: a `DataLoader` with
`sampler=shard(len(dataset), world_size, rank)`, which reads every sample once.
"""

import math
from collections.abc import Iterator, Sequence, Sized
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from miniddp.process import Group, device


def shard(
    length: int, world_size: int, rank: int, contiguous: bool = False
) -> range:
    """The positions, out of `length`, of `rank`: every `world_size`-th, or one
    `contiguous` block. Lengths differ by one at most, and may be 0."""
    if not 0 <= rank < world_size:
        raise ValueError(f"Invalid rank {rank}: not in 0..{world_size - 1}")
    if contiguous:
        start = length * rank // world_size
        end = length * (rank + 1) // world_size
        return range(start, end)
    return range(rank, length, world_size)


def epoch_order(length: int, shuffle: bool, seed: int, epoch: int) -> list[int]:
    """All positions in an epoch's order, which depends on nothing else."""
    if not shuffle:
        return list(range(length))
    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(length, generator=generator).tolist()


def equalise(
    order: Sequence[int], world_size: int, drop_last: bool
) -> list[int]:
    """Make `world_size` divide the length: drop the end or repeat the start."""
    rounded = math.floor if drop_last else math.ceil
    total = rounded(len(order) / world_size) * world_size
    return list(islice(cycle(order), total))


class DistributedSampler(Sampler[int]):
    """The indices of torch's `DistributedSampler`, and a state to resume from.

    Without `drop_last` some samples are read twice. Raises `ValueError` for a
    bad rank, for a dataset that leaves it nothing, and for one that has another
    length later.
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
        size = dist.get_world_size() if num_replicas is None else num_replicas
        self.dataset = dataset
        self.num_replicas = size
        self.rank = dist.get_rank() if rank is None else rank
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.length = len(dataset)
        self.total_size = len(equalise(range(self.length), size, drop_last))
        self.num_samples = self.total_size // size
        self.positions = shard(self.total_size, size, self.rank)
        self.epoch = 0
        self.consumed = 0
        self._begin = 0  # where the next iteration does
        if self.num_samples == 0:
            raise ValueError(
                f"an empty shard: the dataset has {self.length} samples for "
                f"{size} ranks (drop_last={drop_last})"
            )

    def _check_length(self) -> None:
        if len(self.dataset) != self.length:
            raise ValueError(
                f"the dataset had {self.length} samples when its sampler was "
                f"made, now it has {len(self.dataset)}: make a new sampler"
            )

    def __len__(self) -> int:
        """Samples per rank in a whole epoch, also after a resume within it."""
        self._check_length()
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        """Start the epoch, or go on, once, where `load_state_dict` says."""
        self._check_length()
        order = epoch_order(self.length, self.shuffle, self.seed, self.epoch)
        order = equalise(order, self.num_replicas, self.drop_last)
        begin = self._begin
        self._begin = 0
        self.consumed = begin
        for consumed in range(begin, self.num_samples):
            self.consumed = consumed + 1
            yield order[self.positions[consumed]]

    def set_epoch(self, epoch: int) -> None:
        """Choose the shuffle; in the epoch of a loaded state keep its place."""
        self._check_length()
        if epoch != self.epoch:
            self.epoch = epoch
            self.consumed = 0
            self._begin = 0

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """The place in the data, the same for every rank, to save after a step.

        `consumed`: a rank's samples of this epoch, by default those given out.
        Workers of a `DataLoader` ask ahead: pass `batches_done * batch_size`.
        """
        self._check_length()
        consumed = self.consumed if consumed is None else consumed
        return {
            "epoch": self.epoch,
            "consumed": min(consumed, self.num_samples),
            "length": self.length,
            "num_replicas": self.num_replicas,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "drop_last": self.drop_last,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin the next iteration where `state` was saved. Raises
        `ValueError`, and changes nothing, where that place has other samples.
        """
        for name, now in self.state_dict().items():
            saved = state.get(name)
            if saved != now and name not in ("epoch", "consumed"):
                raise ValueError(f"saved with {name}={saved}, now it is {now}")
        if not 0 <= state["consumed"] <= len(self):
            raise ValueError(f"consumed={state['consumed']} of {len(self)}")
        self.epoch = state["epoch"]
        self.consumed = state["consumed"]
        self._begin = state["consumed"]


def check_equal_steps(steps: int, process_group: Group = None) -> None:
    """Raise `ValueError` on every rank unless all will take as many `steps`."""
    size = dist.get_world_size(process_group)
    counts = torch.zeros(size, dtype=torch.int64, device=device())
    counts[dist.get_rank(process_group)] = steps
    dist.all_reduce(counts, group=process_group)
    if len(set(counts.tolist())) > 1:
        raise ValueError(
            f"the ranks would take {counts.tolist()} steps: give all as "
            "many batches, as DistributedSampler does"
        )
