"""What a way to share samples does to an epoch, computed for all ranks at once."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from torch.utils.data import DistributedSampler as TorchSampler

from miniddp.sampler import DistributedSampler, shard


def of_all_ranks(
    world_size: int, indices_of: Callable[[int], Iterable[int]]
) -> list[int]:
    """The indices of rank 0, then those of rank 1, and so on."""
    return [index for rank in range(world_size) for index in indices_of(rank)]


def steps_like_one_process(
    length: int, world_size: int, batch_size: int, contiguous: bool
) -> tuple[int, int]:
    """In how many steps the ranks take what one process would take, and of how many.

    Each rank takes the next `batch_size` samples of its shard, one process the next
    `world_size * batch_size` of all. An incomplete last batch is left out.
    """
    joined = world_size * batch_size
    steps = length // joined
    shards = [shard(length, world_size, rank, contiguous) for rank in range(world_size)]
    alike = 0
    for step in range(steps):
        batches = [
            positions[step * batch_size : (step + 1) * batch_size]
            for positions in shards
        ]
        together = sorted(itertools.chain(*batches))
        alike += together == list(range(step * joined, (step + 1) * joined))
    return alike, steps


def compare_with_torch(lengths: Iterable[int], world_sizes: Iterable[int]) -> int:
    """How often torch's and miniddp's samplers gave a rank the same indices.

    In each of three epochs, with and without a shuffle and `drop_last`, with two seeds.
    Raises `AssertionError` where they differ. Empty shards, which miniddp refuses, are
    left out.
    """
    compared = 0
    for length, world_size, shuffle, drop_last in itertools.product(
        lengths, world_sizes, (False, True), (False, True)
    ):
        if drop_last and length < world_size:
            continue
        for rank, seed, epoch in itertools.product(
            range(world_size), (0, 7), (0, 1, 2)
        ):
            options = (world_size, rank, shuffle, seed, drop_last)
            ours = DistributedSampler(range(length), *options)
            theirs = TorchSampler(range(length), *options)  # type: ignore
            ours.set_epoch(epoch)
            theirs.set_epoch(epoch)
            assert list(ours) == list(theirs), (length, options, epoch)
            assert len(ours) == len(theirs), (length, options, epoch)
            compared += 1
    return compared


def read_never_and_twice(length: int, indices: Iterable[int]) -> tuple[float, float]:
    """The part of `length` samples not among the indices, and that more than once."""
    times = Counter(indices)
    twice = sum(count > 1 for count in times.values())
    return 1 - len(times) / length, twice / length


def mean(values: Sequence[float]) -> float:
    """The mean, rounded once."""
    return math.fsum(values) / len(values)


def mean_with_repeats(values: Sequence[float], world_size: int) -> float:
    """The mean over all that is read if samplers repeat samples to fill all shards."""

    def indices_of(rank: int) -> Iterable[int]:
        return DistributedSampler(values, world_size, rank, shuffle=False)

    return mean([values[index] for index in of_all_ranks(world_size, indices_of)])


def mean_of_means(values: Sequence[float], world_size: int) -> float:
    """The mean of the means over exact shards, which need not be equal."""
    shards = [shard(len(values), world_size, rank) for rank in range(world_size)]
    return mean([mean([values[index] for index in positions]) for positions in shards])


def mean_of_sums(values: Sequence[float], world_size: int) -> float:
    """The sum over exact shards, divided by the sum of their counts."""
    shards = [shard(len(values), world_size, rank) for rank in range(world_size)]
    total = math.fsum(values[index] for positions in shards for index in positions)
    return total / sum(map(len, shards))


def padding_share(lengths: Sequence[int], batch_size: int, multiple: int) -> float:
    """Which part of the tokens is padding, in percent.

    Samples of these lengths are batched in their order. Each row of a batch is padded
    to its longest, and from there to a multiple.
    """
    padded = 0
    for first in range(0, len(lengths), batch_size):
        batch = lengths[first : first + batch_size]
        padded += len(batch) * math.ceil(max(batch) / multiple) * multiple
    return 100 * (1 - sum(lengths) / padded)


def times_read(
    length: int,
    world_size: int,
    done: int,
    go_on: Callable[[DistributedSampler, dict[str, int]], Iterable[int]],
) -> tuple[int, int, int]:
    """Samples read never, once and more often in an epoch that is interrupted.

    Each rank reads `done` samples. Then a new sampler and the old one's state are given
    to `go_on`, whose samples are read too.
    """
    times: Counter[int] = Counter()
    for rank in range(world_size):
        sampler = DistributedSampler(range(length), world_size, rank)
        times.update(itertools.islice(sampler, done))
        again = DistributedSampler(range(length), world_size, rank)
        times.update(go_on(again, sampler.state_dict()))
    once = sum(count == 1 for count in times.values())
    often = sum(count > 1 for count in times.values())
    return length - len(times), once, often
