"""Exercise 15: a step that sends 2 Ψ, with sharded optimizer state.

An all-reduce gives every rank all gradients, though each rank
updates only its own part of the parameters. Leave out what nobody
needs: reduce-scatter the gradients, update, all-gather.

- Put all parameters into one flat vector, in their order.
- Pad it with zeros, so that every rank's part is equally long.
- `miniddp.ring` has `reduce_scatter` and `all_gather`: give them
  the N parts of a flat vector, from `chunk`.
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, nn


def shard_of(
    parameters: Sequence[Tensor],
    process_group: dist.ProcessGroup | None = None,
) -> nn.Parameter:
    """A copy of this rank's part of the parameters: a flat vector.

    All ranks' parts are equally long. An optimizer will be built on it.
    """
    raise NotImplementedError("exercise 15: cut the flat vector")


def sharded_step(
    parameters: Sequence[Tensor],
    shard: nn.Parameter,
    optimizer,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """From each rank's own gradients to equal new parameters.

    Give `shard` this rank's part of the mean gradient, let `optimizer`
    update it, and write all parts into `parameters`. Afterwards neither
    `parameters` nor `shard` has a gradient.
    """
    raise NotImplementedError("exercise 15: reduce-scatter, update, all-gather")
