"""Is each gradient the mean of the ranks? A small training finds out, for any hooks."""

import textwrap
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from miniddp import set_seed
from miniddp.process import device
from miniddp.replicate import verify_replicas

STEPS = 3
FEATURES = 8


def small_model() -> nn.Module:
    """Three linear layers, six parameters, the same on every rank; inputs (n, 8)."""
    set_seed(0)
    model = nn.Sequential(
        nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)
    )
    return model.to(device())


def backward(model: nn.Module, micro_batches: Sequence[Tensor]) -> None:
    """Accumulate the gradient of the mean loss of equal micro-batches."""
    for inputs in micro_batches:
        loss = model(inputs).square().mean() / len(micro_batches)
        loss.backward()


def origin(gradient: Tensor, local: Tensor) -> str:
    """Says whether a gradient is this rank's own, the mean of all ranks, or neither.

    `local` is what this rank's own data give.
    """
    mean = local / dist.get_world_size()
    dist.all_reduce(mean)
    if torch.allclose(gradient, mean, rtol=1e-4, atol=1e-7):
        return "mean of the ranks"
    return "own gradient" if torch.equal(gradient, local) else "neither own nor mean"


def train_with(
    rank: int, install: Callable[[nn.Module], object], micro_batches: int = 1
) -> list[dict[str, str]]:
    """The origin of each gradient by its parameter, for each of three steps.

    `install` gives the model its hooks, or whatever else shall average. A copy of the
    model, without them, computes this rank's own gradients. Prints what is found, and
    whether the replicas are equal at the end.
    """
    torch.manual_seed(100 + rank)
    data = torch.randn(STEPS, micro_batches, 4, FEATURES, device=device())
    model = small_model()
    alone = small_model()
    install(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = []
    for batches in data:
        alone.load_state_dict(model.state_dict())
        alone.zero_grad()
        backward(alone, batches)
        backward(model, batches)
        origins = {}
        for name, parameter in model.named_parameters():
            local = alone.get_parameter(name)
            assert parameter.grad is not None, f"{name} has no gradient"
            assert local.grad is not None, f"{name} has no gradient in the copy"
            origins[name] = origin(parameter.grad, local.grad)
        steps.append(origins)
        optimizer.step()
        optimizer.zero_grad()
    for line in summary(steps):
        say(line)
    try:
        verify_replicas(model)
        say("replicas at the end: equal")
    except ValueError:
        say("replicas at the end: different")
    return steps


def summary(steps: Sequence[dict[str, str]]) -> list[str]:
    """A line for each origin, with its steps, counted from 1, and its parameters.

    The parameters are left out if all of a step have this origin.
    """
    in_steps: dict[str, list[str]] = {}
    for number, origins in enumerate(steps, start=1):
        for kind in dict.fromkeys(origins.values()):
            names = [name for name in origins if origins[name] == kind]
            what = kind if len(names) == len(origins) else f"{kind}: {' '.join(names)}"
            in_steps.setdefault(what, []).append(str(number))
    return [
        f"{'steps' if len(numbers) > 1 else 'step'} {', '.join(numbers)}: {what}"
        for what, numbers in in_steps.items()
    ]


def say(text: str) -> None:
    """Prints at once, in lines short enough for two ranks beside each other."""
    print(textwrap.fill(text, 34, subsequent_indent="  "), flush=True)
