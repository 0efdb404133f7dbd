"""Case 9: a layer is unfrozen after the model was wrapped."""

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from instruments.replicas import compare_gradients, report, weights
from instruments.toy import loss_of, own_batches, small_model, train


def unfreeze_after_wrapping(rank: int) -> Tensor:
    model = small_model()
    model[0].requires_grad_(False)
    ddp = DistributedDataParallel(model)
    train(ddp, own_batches(rank, 2))
    model[0].requires_grad_(True)
    train(ddp, own_batches(rank, 3))
    report(model)
    return weights(model)


def gradients_after_unfreezing(rank: int) -> None:
    model = small_model()
    model[0].requires_grad_(False)
    ddp = DistributedDataParallel(model)
    model[0].requires_grad_(True)
    loss_of(ddp(own_batches(rank, 1)[0])).backward()
    compare_gradients(model)


def wrap_again_after_unfreezing(rank: int) -> Tensor:
    model = small_model()
    model[0].requires_grad_(False)
    train(DistributedDataParallel(model), own_batches(rank, 2))
    model[0].requires_grad_(True)
    train(DistributedDataParallel(model), own_batches(rank, 3))
    report(model)
    return weights(model)
