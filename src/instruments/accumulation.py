"""What gradient do accumulated micro-batches leave, and which of them are in it?

A `Probe` answers the second question. Micro-batch i gives its weight i the gradient 1
on rank 0 and 3 on rank 1, and all others nothing. So 2 in place i is the mean of two
ranks, 1 or 3 is what a rank had alone, and 0 means that the micro-batch is not in this
step.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import miniddp
from instruments.gradients import flat_gradient
from miniddp.process import device


class Probe(nn.Module):
    """A weight for each micro-batch; the loss is that of i, 3 times it on rank 1."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count, device=device()))

    def forward(self, i: int, rank: int) -> Tensor:
        return self.weight[i] * (1 + 2 * rank)


def accumulate(
    rank: int,
    count: int,
    synchronises: Callable[[int], bool],
    steps: Callable[[int], bool],
) -> list[list[int]]:
    """The gradients at each step of torch's DDP over `count` micro-batches.

    `synchronises(i)` and `steps(i)` decide for micro-batch i. Prints the gradients, and
    what is left at the end.
    """
    probe = Probe(count)
    ddp = DistributedDataParallel(probe)
    found = []
    for i in range(count):
        with nullcontext() if synchronises(i) else ddp.no_sync():
            ddp(i, rank).backward()
        if steps(i):
            found.append(show(f"after {i}:", probe))
            ddp.zero_grad()
    if probe.weight.grad is not None:
        show("left:   ", probe)
    return found


def accumulate_with(
    rank: int,
    count: int,
    install: Callable[[nn.Parameter], object],
    steps: Callable[[int], bool],
) -> list[list[int]]:
    """The same without DDP: `install` gives the probe's weight a hook that averages."""
    probe = Probe(count)
    install(probe.weight)
    found = []
    for i in range(count):
        probe(i, rank).backward()
        if steps(i):
            found.append(show(f"after {i}:", probe))
            probe.zero_grad()
    return found


def show(title: str, probe: Probe) -> list[int]:
    """Print a probe's gradient, a dot for 0, and return it."""
    assert probe.weight.grad is not None, "no micro-batch had a gradient"
    values = [int(value) for value in probe.weight.grad]
    print(title, *(value or "·" for value in values), flush=True)
    return values


def tokens_of(batch: Tensor) -> int:
    """How many tokens of (sequences, length) are predicted: all but each first one."""
    return batch[:, 1:].numel()


def weighted_gradient(
    model: nn.Module, batches: Sequence[Tensor], weights: Sequence[float]
) -> Tensor:
    """The gradient that DDP leaves if these weights multiply the mean losses."""
    ddp = miniddp.DistributedDataParallel(model)
    for i, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
        with ddp.no_sync() if i + 1 < len(batches) else nullcontext():
            loss = weight * ddp(input_ids=batch, labels=batch).loss
            loss.backward()
    return flat_gradient(model)


def gradient_of_all_tokens(model: nn.Module, batches: Sequence[Tensor]) -> Tensor:
    """The gradient of the mean loss over all tokens, on one process."""
    total = sum(map(tokens_of, batches))
    for batch in batches:
        share = tokens_of(batch) / total
        loss = share * model(input_ids=batch, labels=batch).loss
        loss.backward()
    return flat_gradient(model)
