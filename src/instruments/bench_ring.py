"""Time the ring beside the library's all-reduce: `python -m instruments.bench_ring --ranks 2 4`."""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from instruments.cost import fit_ring_all_reduce
from miniddp import ring
from miniddp.launch import run_ranks
from miniddp.process import device

MEGABYTE = 10**6

ALGORITHMS: dict[str, Callable[[Tensor], object]] = {
    "ring": ring.all_reduce,
    "library": dist.all_reduce,
    "root": ring.root_all_reduce,
}


@dataclass(frozen=True)
class Timing:
    """All-reduces of one size by one algorithm. `rounds` are seconds, of the slowest rank each."""

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
        """Bytes per second that each rank would send in a ring (nccl-tests, PERFORMANCE.md)."""
        return self.algorithm_bandwidth * 2 * (self.ranks - 1) / self.ranks


def bench(
    ranks: int,
    sizes: Sequence[int],
    rounds: int = 7,
    algorithms: Sequence[str] = ("ring", "library"),
    backend: str = "gloo",
) -> list[Timing]:
    """Time all-reduces of float32 tensors of `sizes` bytes, on `ranks` processes of this machine.

    gloo reduces in host memory, nccl needs a GPU for each rank. In every round each algorithm
    runs once, in an order that alternates, and so a slow moment of the machine hits all of them.
    Raises `RanksFailed` if an algorithm's result is not the library's.
    """
    results = run_ranks(
        measure, ranks, sizes, rounds, algorithms, backend, backend=backend, timeout=600
    )
    return list(results[0])


def measure(
    rank: int, sizes: Sequence[int], rounds: int, algorithms: Sequence[str], backend: str
) -> list[Timing]:
    place = device() if backend == "nccl" else torch.device("cpu")
    timings = []
    for size in sizes:
        original = torch.rand(size // 4, device=place)  # float32: 4 bytes each
        expected = original.clone()
        dist.all_reduce(expected)
        seconds: dict[str, list[float]] = {name: [] for name in algorithms}
        for number in range(1 + rounds):
            for name in algorithms if number % 2 else reversed(algorithms):
                tensor = original.clone()
                took = slowest(timed(ALGORITHMS[name], tensor), place)
                if number > 0:
                    seconds[name].append(took)
                else:  # the first round warms up, and it checks
                    torch.testing.assert_close(tensor, expected)
        timings += [
            Timing(name, backend, dist.get_world_size(), original.nbytes, tuple(seconds[name]))
            for name in algorithms
        ]
    return timings


def timed(all_reduce: Callable[[Tensor], object], tensor: Tensor) -> float:
    dist.barrier()
    synchronize(tensor)
    start = time.perf_counter()
    all_reduce(tensor)
    synchronize(tensor)
    return time.perf_counter() - start


def synchronize(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def slowest(seconds: float, place: torch.device) -> float:
    longest = torch.tensor(seconds, dtype=torch.float64, device=place)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.item()


def fit(timings: Sequence[Timing]) -> tuple[float, float]:
    """alpha (seconds per message) and beta (seconds per byte sent) of one algorithm's timings.

    The model of a ring: 2 (N - 1) messages of S / N bytes each take alpha + beta S / N seconds.
    The least sum of relative errors: the small sizes count as much as the large ones, and a time
    that something disturbed counts little.
    """
    link = fit_ring_all_reduce(
        [timing.bytes for timing in timings],
        [timing.seconds for timing in timings],
        timings[0].ranks,
    )
    return link.alpha, link.beta


def ratio(timing: Timing, reference: Timing) -> float:
    """The median over the rounds of `timing`'s time over `reference`'s."""
    return median(a / b for a, b in zip(timing.rounds, reference.rounds, strict=True))


def report(timings: Sequence[Timing]) -> str:
    """The timings of one call of `bench` as text: a line for each, then the fit."""
    lines = [
        f"{'ranks':>5} {'MB':>8} {'algorithm':<9} {'ms':>9} {'algbw GB/s':>10} {'busbw GB/s':>10} "
        f"{'over library':>12}"
    ]
    library = {timing.bytes: timing for timing in timings if timing.algorithm == "library"}
    for timing in timings:
        over = f"{ratio(timing, library[timing.bytes]):.2f}" if timing.bytes in library else ""
        lines.append(
            f"{timing.ranks:>5} {timing.bytes / MEGABYTE:>8g} {timing.algorithm:<9} "
            f"{timing.seconds * 1e3:>9.2f} {timing.algorithm_bandwidth / 1e9:>10.2f} "
            f"{timing.bus_bandwidth / 1e9:>10.2f} {over:>12}"
        )
    for name in ("ring", "library"):
        own = [timing for timing in timings if timing.algorithm == name]
        if len({timing.bytes for timing in own}) > 1:
            alpha, beta = fit(own)
            lines.append(f"{name}: alpha {alpha * 1e6:.0f} us, beta {beta * 1e9:.3f} ns per byte")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m instruments.bench_ring", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--megabytes", type=float, nargs="+", default=[0.1, 1, 16, 64, 256])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--root", action="store_true", help="also time the root-based all-reduce")
    options = parser.parse_args()
    if min(options.ranks) < 2 or min(options.megabytes) <= 0 or options.rounds < 1:
        parser.error("expected at least 2 ranks, sizes above 0 MB and at least 1 round")
    algorithms = ["ring", "library", *(["root"] if options.root else [])]
    sizes = [round(megabytes * MEGABYTE) for megabytes in options.megabytes]
    for ranks in options.ranks:
        for backend in ("gloo", "nccl"):
            if backend == "nccl" and torch.cuda.device_count() < ranks:
                continue
            print(f"{ranks} ranks over {backend}, median of {options.rounds} rounds")
            print(report(bench(ranks, sizes, options.rounds, algorithms, backend)), flush=True)


if __name__ == "__main__":
    main()
