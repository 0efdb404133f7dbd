"""How far data parallelism scales: what backward hides of communication, and what is left."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from instruments.cost import check_amounts


@dataclass(frozen=True)
class Overlap:
    """When each bucket's all-reduce starts and ends, in seconds since backward began.

    `exposed` is the time after the end of backward for which the ranks still wait.
    """

    starts: tuple[float, ...]
    ends: tuple[float, ...]
    exposed: float


def overlap(ready: Sequence[float], seconds: Sequence[float], backward_seconds: float) -> Overlap:
    """Simulate the all-reduces of a backward pass, one at a time and in the order of the buckets.

    Bucket i is ready `ready[i]` seconds after backward began and takes `seconds[i]` to reduce. It
    starts when it is ready and the one before it is done (Li et al., VLDB 2020, section 3.2).
    Raises `ValueError` if there is not one time of each kind per bucket, or if a bucket is ready
    after the end of backward.
    """
    check_amounts(backward_seconds=backward_seconds)
    if len(ready) != len(seconds):
        raise ValueError(f"{len(ready)} buckets become ready, but {len(seconds)} are reduced")
    starts: list[float] = []
    ends: list[float] = []
    free = 0.0
    for index, (moment, duration) in enumerate(zip(ready, seconds, strict=True)):
        check_amounts(**{f"ready[{index}]": moment, f"seconds[{index}]": duration})
        if moment > backward_seconds:
            raise ValueError(
                f"bucket {index} is ready at {moment!r} s, after the end of backward at "
                f"{backward_seconds!r} s"
            )
        starts.append(max(moment, free))
        free = starts[-1] + duration
        ends.append(free)
    return Overlap(tuple(starts), tuple(ends), max(0.0, free - backward_seconds))


def ready_times(bucket_bytes: Sequence[float], backward_seconds: float) -> list[float]:
    """When buckets become ready if backward produces the same number of bytes in every second."""
    check_amounts(backward_seconds=backward_seconds)
    check_amounts(**{f"bucket_bytes[{i}]": size for i, size in enumerate(bucket_bytes)})
    total = sum(bucket_bytes)
    if total == 0:
        return [0.0] * len(bucket_bytes)
    return [backward_seconds * min(1.0, done / total) for done in accumulate(bucket_bytes)]


def scaling_efficiency(seconds_on_one: float, seconds_on_all: float) -> float:
    """Weak scaling: step time on one rank over step time on N, each rank with the same batch.

    1 is perfect; the speed-up is N times the efficiency.
    """
    check_amounts(seconds_on_one=seconds_on_one, seconds_on_all=seconds_on_all)
    if seconds_on_all == 0:
        raise ValueError("seconds_on_all must be more than 0")
    return seconds_on_one / seconds_on_all


def smallest_batch_per_rank(
    flops_per_second: float, bytes_per_second: float, gradient_bytes: float = 2
) -> float:
    """Tokens per rank above which backward hides the all-reduce: B / X > C / W.

    Backward computes 4 FLOPs per parameter and token; a ring sends twice each gradient's bytes
    over a link of W bytes per second. With 2-byte gradients 4 B / (X C) > 2 * 2 / W, and the
    sizes of the layers cancel (scaling-book, "How to Parallelize a Transformer for Training").
    """
    check_amounts(
        flops_per_second=flops_per_second,
        bytes_per_second=bytes_per_second,
        gradient_bytes=gradient_bytes,
    )
    if bytes_per_second == 0:
        raise ValueError("bytes_per_second must be more than 0")
    return flops_per_second / bytes_per_second * gradient_bytes / 2


def is_compute_bound(
    batch_per_rank: float,
    flops_per_second: float,
    bytes_per_second: float,
    gradient_bytes: float = 2,
) -> bool:
    """Whether a rank's batch, in tokens, exceeds `smallest_batch_per_rank`."""
    check_amounts(batch_per_rank=batch_per_rank)
    return batch_per_rank > smallest_batch_per_rank(
        flops_per_second, bytes_per_second, gradient_bytes
    )
