"""Case 3: reentrant checkpointing meets `find_unused_parameters`."""

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from instruments.toy import loss_of, own_batches
from miniddp import set_seed
from miniddp.process import device


class Checkpointed(nn.Module):
    """Computes its second layer again in backward, in order to save memory."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 1)
        self.use_reentrant = use_reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs).tanh()
        if self.use_reentrant is None:
            return self.second(hidden)
        return checkpoint(self.second, hidden, use_reentrant=self.use_reentrant)


def checkpoint_reentrant(
    rank: int, use_reentrant: bool | None = True, find_unused: bool = True
) -> list[Tensor]:
    set_seed(0)
    model = Checkpointed(use_reentrant).to(device())
    ddp = DistributedDataParallel(model, find_unused_parameters=find_unused)
    loss_of(ddp(own_batches(rank, 1)[0])).backward()
    return [parameter.grad.cpu() for parameter in model.parameters()]


def checkpoint_not_reentrant(rank: int) -> list[Tensor]:
    return checkpoint_reentrant(rank, use_reentrant=False)
