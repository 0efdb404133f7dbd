"""Exercise 7: gradients in buckets, sent while backward runs.

- A bucket closes when it has *reached* its cap.
- A bucket is sent when it is full and all before it have been sent.
- `all_reduce(..., async_op=True)` returns a work: call its `wait()`.
- Backward may produce gradients in any order.
"""

from collections.abc import Callable, Sequence

from torch import nn


def plan(num_bytes: Sequence[int], cap_bytes: int) -> list[list[int]]:
    """Split parameters into buckets: lists of indices, the last first.

    `num_bytes[i]` is the size of parameter i. All buckets have one cap.
    """
    raise NotImplementedError("exercise 7: plan the buckets")


def average_in_buckets(module: nn.Module, cap_bytes: int) -> Callable[[], None]:
    """Let each backward pass through `module` average its gradients.

    All parameters have one dtype and get a gradient in every pass.
    Returns what has to be called after each backward: it waits for the
    buckets, and leaves the mean over all ranks in every `.grad`.
    """
    raise NotImplementedError("exercise 7: register the hooks")
