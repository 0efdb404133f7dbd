"""Exercise 8: one synchronisation for several micro-batches.

Leave in every `.grad` the gradient of the mean loss over all tokens of
all micro-batches of all ranks. The ranks' counts of tokens differ.

- All micro-batches but the last: their forward and their backward are
  not synchronised.
- DDP takes the mean over the ranks. What must a loss be multiplied by,
  so that every token counts the same in the end?
- An error in a micro-batch must leave `ddp` as it was.
"""

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

MeanLoss = Callable[[DistributedDataParallel, Tensor], Tensor]


def accumulate(
    ddp: DistributedDataParallel,
    mean_loss: MeanLoss,
    micro_batches: Sequence[Tensor],
) -> None:
    """Forward and backward of every micro-batch.

    `mean_loss(ddp, batch)` runs the model and returns the mean loss over
    the `len(batch)` tokens of a micro-batch. No micro-batch is empty.
    """
    raise NotImplementedError("exercise 8: accumulate the gradients")
