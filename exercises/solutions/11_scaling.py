"""A solution of exercise 11."""

from collections.abc import Sequence


def efficiency(
    forward: float,
    backward: float,
    bucket_bytes: Sequence[int],
    world_size: int,
    alpha: float,
    beta: float,
) -> float:
    filled, arrived = 0, 0.0
    for size in bucket_bytes:
        filled += size
        full = backward * filled / sum(bucket_bytes)
        sends = 2 * (world_size - 1)
        arrived = max(full, arrived) + sends * (alpha + size / world_size * beta)
    return (forward + backward) / (forward + max(backward, arrived))


def smallest_batch(
    target: float,
    seconds_per_sample: float,
    bucket_bytes: Sequence[int],
    world_size: int,
    alpha: float,
    beta: float,
) -> int:
    def reaches(batch: int) -> bool:
        compute = batch * seconds_per_sample
        times = compute / 3, compute * 2 / 3
        return efficiency(*times, bucket_bytes, world_size, alpha, beta) >= target

    high = 1
    while not reaches(high):
        high *= 2
    low = high // 2  # too small, or 0
    while high - low > 1:
        middle = (low + high) // 2
        if reaches(middle):
            high = middle
        else:
            low = middle
    return high
