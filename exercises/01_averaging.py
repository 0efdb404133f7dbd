"""Exercise 1: the gradient of the global batch, from those of the ranks.

Each rank has taken the mean loss of its own samples. Its gradients are
those of that mean. The ranks need not have equally many samples.

- What does each rank's gradient count for?
- A rank without samples has no mean: its gradients may hold anything,
  even NaN.
- float16 ends at 65,504, so do not let a sum grow larger than needed.
"""

from collections.abc import Sequence

from torch import Tensor

Gradients = dict[str, Tensor]


def joined_gradients(
    gradients: Sequence[Gradients],
    counts: Sequence[int],
) -> Gradients:
    """The gradients of the mean loss over the samples of all ranks.

    `gradients[r]` maps the name of each parameter to its gradient on rank
    r, which has `counts[r]` samples. Changes none of them.

    Raises `ValueError` if no rank has a sample.
    """
    raise NotImplementedError("exercise 1: combine the gradients")
