"""Exercise 14: a doctor for data parallel training.

Look at a training step after backward, before the optimizer steps, and
say what is wrong with it. Three faults are worth a line each:

- "gradient differs: NAME" for a parameter whose gradient is not the same
  on every rank, or that some ranks have and others have not;
- "not optimized: NAME" for a trainable parameter that the optimizer of
  any rank does not hold;
- "same inputs on every rank" if all ranks hold equal inputs.

Ranks must not wait for each other for ever, whatever they find: all of
them have to call the same collectives.
"""

import torch
from torch import Tensor, nn


def examine(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: Tensor,
) -> list[str]:
    """Return the findings, the same list on every rank; empty if all is well.

    First the gradients, then the optimizer, each in the order of
    `module.named_parameters()`, then the inputs. The parameters have the
    same names on every rank; inputs may have different shapes.
    """
    raise NotImplementedError("exercise 14: examine the step")
