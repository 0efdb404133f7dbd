"""How far data parallelism scales: efficiency, and the batch that hides messages."""

from instruments.cost import check_amounts


def scaling_efficiency(seconds_on_one: float, seconds_on_all: float) -> float:
    """Weak scaling: step time on one rank over step time on N.

    Each rank has the same batch. 1 is perfect; the speed-up is N times the efficiency.
    """
    check_amounts(seconds_on_one=seconds_on_one, seconds_on_all=seconds_on_all)
    if seconds_on_all == 0:
        raise ValueError("seconds_on_all must be more than 0")
    return seconds_on_one / seconds_on_all


def smallest_batch_per_rank(
    flops_per_second: float, bytes_per_second: float, gradient_bytes: float = 4
) -> float:
    """Tokens per rank above which backward hides the all-reduce.

    C / W times half of a gradient: backward computes 4 FLOPs per parameter and token; a
    ring through very many ranks sends each gradient twice. 4 P b / C > 2 P g / W, and
    the sizes of the layers cancel (scaling-book, "How to Parallelize a Transformer for
    Training", which has gradients of 2 bytes: B / X > C / W).

    Args:
        flops_per_second: What one rank computes.
        bytes_per_second: What goes through the narrowest place of the ring: the link of
            a GPU within one node, all network cards of a node together between nodes.
        gradient_bytes: 4 as DDP sends them, under autocast too; 2 if the parameters are
            bfloat16 or a hook compresses.
    """
    check_amounts(
        flops_per_second=flops_per_second,
        bytes_per_second=bytes_per_second,
        gradient_bytes=gradient_bytes,
    )
    if bytes_per_second == 0:
        raise ValueError("bytes_per_second must be more than 0")
    return flops_per_second / bytes_per_second * gradient_bytes / 2
