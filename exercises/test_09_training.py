"""When `exercises/09_training.py` is right: step by step beside one process."""

import pytest
import torch
from harness import load
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from miniddp import run_ranks

exercise = load("09_training")
BATCH_SIZE = 12
LEARNING_RATE = 0.3
AFTER = {
    0: "look at the first weights, the samples, and the mean of the losses",
    1: "after a right step 0, look at the mean of the gradients",
}


def make_net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def samples(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 5, generator=generator, dtype=torch.float64)
    return inputs, inputs[:, :3].argmax(-1)


def train_alone() -> tuple[list[float], float]:
    net = make_net(0)
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
    inputs, targets = samples(100, 1)
    losses = []
    for i in range(len(inputs) // BATCH_SIZE):
        part = slice(i * BATCH_SIZE, (i + 1) * BATCH_SIZE)
        optimizer.zero_grad()
        loss = cross_entropy(net(inputs[part]), targets[part])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    test_inputs, test_targets = samples(31, 2)
    accuracy = (net(test_inputs).argmax(-1) == test_targets).double().mean().item()
    return losses, accuracy


def train_on_rank(rank: int) -> tuple[list[float], float]:
    return exercise.train(
        make_net(seed=rank), *samples(100, 1), *samples(31, 2), BATCH_SIZE, LEARNING_RATE
    )


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_it_is_the_training_of_one_process(world_size: int) -> None:
    wanted_losses, wanted_accuracy = train_alone()
    for rank, (losses, accuracy) in enumerate(run_ranks(train_on_rank, world_size, timeout=30)):
        assert len(losses) == len(wanted_losses), f"rank {rank} took {len(losses)} steps"
        for step, (loss, wanted) in enumerate(zip(losses, wanted_losses, strict=True)):
            assert loss == pytest.approx(wanted, abs=1e-10), (
                f"the loss of step {step} on rank {rank}: {AFTER.get(step, 'look at zero_grad')}"
            )
        assert accuracy == pytest.approx(wanted_accuracy, abs=1e-12), (
            f"the accuracy on rank {rank}: right predictions of all ranks over the size of the set"
        )
