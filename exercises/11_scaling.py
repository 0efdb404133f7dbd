"""Exercise 11: predict how far data parallelism scales.

Weak scaling: every rank has the same batch, whatever their number. All
times are in seconds, sizes in bytes. A send takes `alpha` seconds and
`beta` seconds per byte, and an all-reduce is a ring.

- Backward makes the same number of bytes in every second, and fills the
  buckets in their order. A bucket is sent when it is full and the bucket
  before it has arrived.
- The step ends when backward is over and the last bucket has arrived.
"""

from collections.abc import Sequence


def efficiency(
    forward: float,
    backward: float,
    bucket_bytes: Sequence[int],
    world_size: int,
    alpha: float,
    beta: float,
) -> float:
    """The step of one rank alone over the step of `world_size` ranks.

    `forward` and `backward` are those of one rank.
    """
    raise NotImplementedError("exercise 11: predict the efficiency")


def smallest_batch(
    target: float,
    seconds_per_sample: float,
    bucket_bytes: Sequence[int],
    world_size: int,
    alpha: float,
    beta: float,
) -> int:
    """The smallest batch per rank whose efficiency is at least `target`.

    `target` is less than 1. A third of a sample's time is forward, two
    thirds are backward.
    """
    raise NotImplementedError("exercise 11: find the smallest batch")
