"""How far data parallelism scales: efficiency, and the batch that hides the all-reduce."""

from instruments.cost import check_amounts


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
