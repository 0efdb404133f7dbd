"""Time the ring beside the library's all-reduce: `python -m instruments.bench_ring`."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from instruments.clock import clock, slowest
from instruments.cost import Link, fit_ring_all_reduce
from miniddp import ring
from miniddp.launch import run_ranks
from miniddp.process import device

MEGABYTE = 10**6
FLOAT32_BYTES = 4

ALGORITHMS: dict[str, Callable[[Tensor], object]] = {
    "ring": ring.all_reduce,
    "library": dist.all_reduce,
    "root": ring.root_all_reduce,
}


@dataclass(frozen=True)
class Timing:
    """All-reduces of one size by one algorithm.

    Attributes:
        bytes: Size of the tensor.
        rounds: Seconds, of the slowest rank each.
    """

    algorithm: str
    backend: str
    ranks: int
    bytes: int
    rounds: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return median(self.rounds)

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes of the tensor per second."""
        return self.bytes / self.seconds

    @property
    def bus_bandwidth(self) -> float:
        """Bytes a second that a rank of a ring sends (nccl-tests, PERFORMANCE.md)."""
        return self.algorithm_bandwidth * 2 * (self.ranks - 1) / self.ranks


def bench(
    ranks: int,
    sizes: Sequence[int],
    rounds: int = 7,
    algorithms: Sequence[str] = ("ring", "library"),
    backend: str = "gloo",
) -> list[Timing]:
    """Time all-reduces of float32 tensors of `sizes` bytes, on local processes.

    gloo reduces in host memory, nccl needs a GPU for each of the `ranks`. In every
    round each algorithm runs once, in an order that alternates, and so a slow moment
    of the machine hits all of them. Raises `RanksFailed` if an algorithm's result is
    not the library's.
    """
    results = run_ranks(
        measure,
        ranks,
        sizes,
        rounds,
        algorithms,
        backend,
        backend=backend,
        timeout=600,
    )
    return list(results[0])


def measure(
    rank: int,
    sizes: Sequence[int],
    rounds: int,
    algorithms: Sequence[str],
    backend: str,
) -> list[Timing]:
    memory = device() if backend == "nccl" else torch.device("cpu")
    timings = []
    for size in sizes:
        original = torch.rand(size // FLOAT32_BYTES, device=memory)
        expected = original.clone()
        dist.all_reduce(expected)
        seconds: dict[str, list[float]] = {name: [] for name in algorithms}
        for number in range(1 + rounds):
            for name in algorithms if number % 2 else reversed(algorithms):
                tensor = original.clone()
                took = slowest(timed(ALGORITHMS[name], tensor))
                if number > 0:
                    seconds[name].append(took)
                else:  # the first round warms up, and it checks
                    torch.testing.assert_close(tensor, expected)
        world_size = dist.get_world_size()
        timings += [
            Timing(name, backend, world_size, original.nbytes, tuple(seconds[name]))
            for name in algorithms
        ]
    return timings


def timed(all_reduce: Callable[[Tensor], object], tensor: Tensor) -> float:
    """Seconds of this rank, whose device is done with the tensor at both ends."""
    dist.barrier()
    start = clock()
    all_reduce(tensor)
    return clock() - start


def fit_ring(timings: Sequence[Timing]) -> Link:
    """The link of a ring in one algorithm's timings: `cost.fit_ring_all_reduce`."""
    return fit_ring_all_reduce(
        [timing.bytes for timing in timings],
        [timing.seconds for timing in timings],
        timings[0].ranks,
    )


def ratio(timing: Timing, reference: Timing) -> float:
    """The median over the rounds of `timing`'s time over `reference`'s."""
    return median(a / b for a, b in zip(timing.rounds, reference.rounds, strict=True))


def report(timings: Sequence[Timing]) -> str:
    """The timings of one call of `bench` as text: a line for each, then the links."""
    lines = [
        f"{'ranks':>5} {'MB':>8} {'algorithm':<9} {'ms':>9} {'algbw GB/s':>10} "
        f"{'busbw GB/s':>10} {'over library':>12}"
    ]
    library = {
        timing.bytes: timing for timing in timings if timing.algorithm == "library"
    }
    for timing in timings:
        reference = library.get(timing.bytes)
        over_library = f"{ratio(timing, reference):.2f}" if reference else ""
        lines.append(
            f"{timing.ranks:>5} {timing.bytes / MEGABYTE:>8g} {timing.algorithm:<9} "
            f"{timing.seconds * 1e3:>9.2f} {timing.algorithm_bandwidth / 1e9:>10.2f} "
            f"{timing.bus_bandwidth / 1e9:>10.2f} {over_library:>12}"
        )
    for name in ("ring", "library"):
        of_algorithm = [timing for timing in timings if timing.algorithm == name]
        if len({timing.bytes for timing in of_algorithm}) < 2:
            continue
        link = fit_ring(of_algorithm)
        lines.append(
            f"{name}: alpha {link.alpha * 1e6:.0f} us, "
            f"beta {link.beta * 1e9:.3f} ns per byte"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m instruments.bench_ring", description=__doc__
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument(
        "--megabytes", type=float, nargs="+", default=[0.1, 1, 16, 64, 256]
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--root", action="store_true", help="also time the root-based all-reduce"
    )
    options = parser.parse_args()
    if min(options.ranks) < 2 or min(options.megabytes) <= 0 or options.rounds < 1:
        parser.error("expected at least 2 ranks, sizes above 0 MB and at least 1 round")
    algorithms = ["ring", "library"]
    if options.root:
        algorithms.append("root")
    sizes = [round(megabytes * MEGABYTE) for megabytes in options.megabytes]
    for ranks in options.ranks:
        for backend in ("gloo", "nccl"):
            if backend == "nccl" and torch.cuda.device_count() < ranks:
                continue
            print(f"{ranks} ranks over {backend}, median of {options.rounds} rounds")
            timings = bench(ranks, sizes, options.rounds, algorithms, backend)
            print(report(timings), flush=True)


if __name__ == "__main__":
    main()
