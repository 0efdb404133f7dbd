"""Time a step under each DDP in turn: `python -m instruments.bench_ddp`."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

from instruments.backend import backend_of
from instruments.clock import clock, slowest
from miniddp.ddp import DistributedDataParallel
from miniddp.launch import run_ranks
from miniddp.naive import SimpleDDP
from miniddp.process import device

VOCABULARY = 2000
SHAPES = {5: (256, 5), 25: (512, 7)}
"""Millions of parameters, roughly: width and number of layers of the transformer."""

WARM_UP_ROUNDS = 3

WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "torch": nn.parallel.DistributedDataParallel,
    "miniddp": DistributedDataParallel,
    "simple": SimpleDDP,
}


@dataclass(frozen=True)
class Steps:
    """Training steps under one wrapper, in seconds each, of the slowest rank."""

    wrapper: str
    backend: str
    parameters: int
    rounds: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return median(self.rounds)


class Transformer(nn.Module):
    """Embedding, encoder layers, a head; no dropout: every step does the same."""

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


def bench(
    ranks: int, millions: int, rounds: int = 20, sequences: int = 4
) -> list[Steps]:
    """Time steps of a transformer of 5 or 25 million parameters on local processes.

    Each of the `ranks` takes `sequences` sequences of 64 tokens on its device, over
    NCCL if each has a GPU of its own. Every round runs each wrapper once, in an order
    that rotates, in one process group.
    """
    backend = backend_of(ranks)
    results = run_ranks(
        measure,
        ranks,
        backend,
        millions,
        rounds,
        sequences,
        backend=backend,
        timeout=900,
    )
    return list(results[0])


def measure(
    rank: int, backend: str, millions: int, rounds: int, sequences: int
) -> list[Steps]:
    width, layers = SHAPES[millions]
    torch.manual_seed(rank)
    tokens = torch.randint(VOCABULARY, (sequences, 64), device=device())
    models = {}
    for name, wrap in WRAPPERS.items():
        torch.manual_seed(0)
        models[name] = wrap(Transformer(width, layers).to(device()))
    optimizers = {
        name: torch.optim.SGD(model.parameters(), lr=0.01)
        for name, model in models.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in models}
    names = list(models)
    for number in range(WARM_UP_ROUNDS + rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            took = slowest(timed_step(models[name], optimizers[name], tokens))
            if number >= WARM_UP_ROUNDS:
                seconds[name].append(took)
    count = sum(parameter.numel() for parameter in models[names[0]].parameters())
    return [Steps(name, backend, count, tuple(seconds[name])) for name in names]


def timed_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor
) -> float:
    dist.barrier()
    start = clock()
    optimizer.zero_grad()
    logits = model(tokens).flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, tokens.flatten())
    loss.backward()
    if isinstance(model, SimpleDDP):
        model.sync_gradients()
    optimizer.step()
    return clock() - start


def ratio(steps: Steps, reference: Steps) -> float:
    """The median over the rounds of `steps`' time over `reference`'s."""
    return median(a / b for a, b in zip(steps.rounds, reference.rounds, strict=True))


def report(timings: list[Steps]) -> str:
    """One line per wrapper, then the two ratios."""
    by_name = {steps.wrapper: steps for steps in timings}
    lines = [f"{timings[0].parameters / 1e6:.1f} million parameters"]
    for name, steps in by_name.items():
        lines.append(f"  {name:<8} {steps.seconds * 1e3:8.1f} ms")
    over_torch = ratio(by_name["miniddp"], by_name["torch"])
    simple_over = ratio(by_name["simple"], by_name["miniddp"])
    lines.append(f"  miniddp / torch  {over_torch:.3f}")
    lines.append(f"  simple / miniddp {simple_over:.3f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m instruments.bench_ddp", description=__doc__
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--millions", type=int, nargs="+", choices=list(SHAPES), default=[5, 25]
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--sequences", type=int, default=4)
    options = parser.parse_args()
    if options.ranks < 1 or options.rounds < 1 or options.sequences < 1:
        parser.error("expected at least 1 rank, 1 round and 1 sequence")
    for millions in options.millions:
        timings = bench(options.ranks, millions, options.rounds, options.sequences)
        ranks = f"{options.ranks} ranks over {timings[0].backend}"
        print(f"{ranks}, median of {options.rounds} rounds")
        print(report(timings), flush=True)


if __name__ == "__main__":
    main()
