"""Case 8: the forward pass goes around the wrapper."""

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from instruments.replicas import compare_gradients, report, weights
from instruments.toy import loss_of, own_batches, small_model


def call_the_module(rank: int) -> Tensor:
    ddp = DistributedDataParallel(small_model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for inputs in own_batches(rank, 5):
        optimizer.zero_grad()
        loss_of(ddp.module(inputs)).backward()
        optimizer.step()
    report(ddp.module)
    return weights(ddp)


def gradients_of_the_module(rank: int) -> None:
    ddp = DistributedDataParallel(small_model())
    loss_of(ddp.module(own_batches(rank, 1)[0])).backward()
    compare_gradients(ddp.module)


def call_the_wrapper(rank: int) -> Tensor:
    ddp = DistributedDataParallel(small_model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for inputs in own_batches(rank, 5):
        optimizer.zero_grad()
        loss_of(ddp(inputs)).backward()
        optimizer.step()
    report(ddp.module)
    return weights(ddp)
