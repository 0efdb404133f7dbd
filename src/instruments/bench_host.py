"""What each DDP costs the host: `python -m instruments.bench_host`.

One process, a group of one rank over gloo, many small tensors: there the step is what
Python and C++ do around the gradients.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

from miniddp.ddp import DistributedDataParallel
from miniddp.launch import run_ranks

TENSORS = (100, 300, 1000)
NORMS = 53
"""As many BatchNorms, each with three buffers, as ResNet-50 has."""

WARM_UP_ROUNDS = 3

WRAPPERS: dict[str, Callable[..., nn.Module]] = {
    "torch": nn.parallel.DistributedDataParallel,
    "miniddp": DistributedDataParallel,
}


class ManyTensors(nn.Module):
    """Parameters of 8 × 8, each in the loss once."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(
            nn.Parameter(torch.randn(8, 8)) for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(parameter * x).sum() for parameter in self.tensors]).sum()


@dataclass(frozen=True)
class HostTimes:
    """Seconds of one wrapper: to construct it, and of `rounds` steps."""

    wrapper: str
    construction: float
    rounds: tuple[float, ...]


def measure(
    rank: int, build: Callable[[], nn.Module], x: Tensor, rounds: int, views: bool
) -> list[HostTimes]:
    """Forward and backward under each wrapper in turn, `rounds` times."""
    torch.set_num_threads(1)
    construction = {}
    models = {}
    for name, wrap in WRAPPERS.items():
        module = build()
        start = time.perf_counter()
        models[name] = wrap(module, gradient_as_bucket_view=views)
        construction[name] = time.perf_counter() - start
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for number in range(WARM_UP_ROUNDS + rounds):
        for name in sorted(models, reverse=bool(number % 2)):
            took = timed_step(models[name], x)
            if number >= WARM_UP_ROUNDS:
                seconds[name].append(took)
    return [
        HostTimes(name, construction[name], tuple(seconds[name])) for name in models
    ]


def timed_step(model: nn.Module, x: Tensor) -> float:
    model.zero_grad()
    start = time.perf_counter()
    model(x).sum().backward()
    return time.perf_counter() - start


def bench(
    build: Callable[[], nn.Module], x: Tensor, rounds: int, views: bool
) -> list[HostTimes]:
    times: list[HostTimes] = run_ranks(
        measure, 1, build, x, rounds, views, timeout=600
    )[0]
    return times


def ratio(times: Sequence[HostTimes]) -> float:
    """The median over the rounds of miniddp's time over torch's."""
    torchs, ours = times
    return median(b / a for a, b in zip(torchs.rounds, ours.rounds, strict=True))


def report(what: str, times: Sequence[HostTimes], count: int) -> str:
    """One line: microseconds per tensor, the classes' ratio, the constructors."""
    each = [
        f"{time.wrapper} {median(time.rounds) / count * 1e6:6.1f}" for time in times
    ]
    built = [f"{time.construction * 1e3:.1f}" for time in times]
    return (
        f"{what:<28} {'  '.join(each)} µs per tensor  miniddp / torch {ratio(times):.3f}  "
        f"construction {' and '.join(built)} ms"
    )


def norms() -> nn.Module:
    return nn.Sequential(*(nn.BatchNorm1d(8) for _ in range(NORMS)))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m instruments.bench_host", description=__doc__
    )
    parser.add_argument("--rounds", type=int, default=60)
    rounds = parser.parse_args().rounds
    if rounds < 1:
        parser.error("expected at least 1 round")
    for count in TENSORS:
        for views in (False, True):
            what = f"{count} tensors" + (", as views" if views else "")
            times = bench(partial(ManyTensors, count), torch.ones(8, 8), rounds, views)
            print(report(what, times, count), flush=True)
    times = bench(norms, torch.randn(4, 8), rounds, views=False)
    print(report(f"{NORMS} BatchNorms, their buffers", times, 3 * NORMS))


if __name__ == "__main__":
    main()
