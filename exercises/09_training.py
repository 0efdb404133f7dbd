"""Exercise 9: a whole training on many ranks.

Train `model` by plain SGD, one pass over `inputs` and `targets` in their
order, without shuffling. In step k all ranks together see the samples
that one process would see: `batch_size` of them, the same number on
every rank. What does not fill a last batch is left out.

- Return the mean loss of each global batch, equal on every rank.
- Then count the right predictions on all of `test_inputs`. Their number
  need not divide by the number of ranks, and none is counted twice.
- `model` may differ between the ranks when you get it: rank 0's counts.
- Plain PyTorch is enough. Use DistributedDataParallel or not.
"""

import torch
from torch import nn


def train(
    model: nn.Module,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    test_inputs: torch.Tensor,
    test_targets: torch.Tensor,
    batch_size: int,
    learning_rate: float,
) -> tuple[list[float], float]:
    """The losses of all steps, and the accuracy (0 to 1) after them.

    The loss is the cross-entropy, a mean over samples. `batch_size` is
    that of the global batch, a multiple of the number of ranks.
    """
    raise NotImplementedError("exercise 9: train on all ranks")
