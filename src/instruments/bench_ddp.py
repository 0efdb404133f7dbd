"""Time a step under each DDP in turn: `python -m instruments.bench_ddp --millions 5 25`."""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

from miniddp.ddp import DistributedDataParallel
from miniddp.launch import run_ranks
from miniddp.naive import SimpleDDP
from miniddp.process import device

VOCABULARY = 2000
SHAPES = {5: (256, 5), 25: (512, 7)}
"""Millions of parameters, roughly: width and number of layers of the transformer."""

WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "torch": nn.parallel.DistributedDataParallel,
    "miniddp": DistributedDataParallel,
    "simple": SimpleDDP,
}


@dataclass(frozen=True)
class Steps:
    """Training steps under one wrapper, in seconds each, of the slowest rank."""

    wrapper: str
    parameters: int
    rounds: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return median(self.rounds)


class Transformer(nn.Module):
    """Embedding, encoder layers and a head; without dropout, so that every step does the same."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.head(hidden)
        return logits


def bench(ranks: int, millions: int, rounds: int = 20, sequences: int = 4) -> list[Steps]:
    """Time steps of a transformer of 5 or 25 million parameters on `ranks` local processes.

    Each rank takes `sequences` sequences of 64 tokens. Every round runs each wrapper once, in an
    order that rotates, in one process group.
    """
    return list(run_ranks(measure, ranks, millions, rounds, sequences, timeout=900)[0])


def measure(rank: int, millions: int, rounds: int, sequences: int) -> list[Steps]:
    width, layers = SHAPES[millions]
    torch.manual_seed(rank)
    tokens = torch.randint(VOCABULARY, (sequences, 64), device=device())
    models = {}
    for name, wrap in WRAPPERS.items():
        torch.manual_seed(0)
        models[name] = wrap(Transformer(width, layers).to(device()))
    optimizers = {
        name: torch.optim.SGD(model.parameters(), lr=0.01) for name, model in models.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in models}
    names = list(models)
    warm_up = 3
    for number in range(warm_up + rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            took = slowest(timed_step(models[name], optimizers[name], tokens))
            if number >= warm_up:
                seconds[name].append(took)
    count = sum(p.numel() for p in models[names[0]].parameters())
    return [Steps(name, count, tuple(rounds)) for name, rounds in seconds.items()]


def timed_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> float:
    dist.barrier()
    start = now()
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    if isinstance(model, SimpleDDP):
        model.sync_gradients()
    optimizer.step()
    return now() - start


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def slowest(seconds: float) -> float:
    longest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.item()


def ratio(steps: Steps, reference: Steps) -> float:
    """The median over the rounds of `steps`' time over `reference`'s."""
    return median(a / b for a, b in zip(steps.rounds, reference.rounds, strict=True))


def report(timings: list[Steps]) -> str:
    """One line per wrapper, then the two ratios."""
    by_name = {steps.wrapper: steps for steps in timings}
    lines = [f"{timings[0].parameters / 1e6:.1f} million parameters"]
    lines += [f"  {name:<8} {steps.seconds * 1e3:8.1f} ms" for name, steps in by_name.items()]
    lines += [
        f"  miniddp / torch  {ratio(by_name['miniddp'], by_name['torch']):.3f}",
        f"  simple / miniddp {ratio(by_name['simple'], by_name['miniddp']):.3f}",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m instruments.bench_ddp", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--millions", type=int, nargs="+", choices=list(SHAPES), default=[5, 25])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--sequences", type=int, default=4)
    options = parser.parse_args()
    if options.ranks < 1 or options.rounds < 1 or options.sequences < 1:
        parser.error("expected at least 1 rank, 1 round and 1 sequence")
    for millions in options.millions:
        print(f"{options.ranks} ranks over gloo, median of {options.rounds} rounds")
        print(report(bench(options.ranks, millions, options.rounds, options.sequences)), flush=True)


if __name__ == "__main__":
    main()
