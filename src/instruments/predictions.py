"""What `instruments.network` predicts beside what others measured: `python -m instruments.network`.

- An all-reduce is predicted from the other sizes of its table ("predicted"). What is predicted has
  not been seen, but its neighbours have, a factor of four apart: this is interpolation. In tables
  of every other size they are a factor of 16 apart, and it is worse ("half tables").
- It is predicted from data sheets ("data sheet"). No table is used, but a few numbers of
  `instruments.network`, the same for all nodes, were chosen with these tables at hand: how much of
  NVLink a program reaches, `FILL`, and what a hop over EFA takes. Where the source does not state
  the network cards, they are those of a DGX of the same GPU ("assumed DGX").
- Training is predicted from one GPU's time and a table of the link, the bandwidth of fewer GPUs
  from that of eight, the decay to 128 and 256 GPUs from 8 to 64.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from statistics import median

import numpy as np

from instruments.cost import Link
from instruments.measurements import Row, read, sources
from instruments.network import NODES, Measured, Network, fit, volume

MIB, GIB = 2**20, 2**30
MEDIAN, WORST, WORST_BELOW, WORST_TRAINING = 0.05, 0.25, 0.5, 0.1
"""Largest errors that are allowed: the median and the worst of a set-up from 1 MiB up, the worst
below, the worst of a training."""

MEDIANS = {"b200_8gpu": 0.06}
"""Set-ups with a larger median. The time of eight B200 stands still from 8 to 16 MiB, and bus
bandwidth leaps by 42 % from 64 to 128 MiB and by 13 % from 4 to 8 GiB: no neighbour says so."""

WORST_ASSUMED = 0.1
"""Largest error from 1 GiB up of nodes that are taken for a DGX."""

ROUNDED = 0.1
"""A bandwidth that its source prints in so few digits is no measurement: 10 % up or down."""


@dataclass(frozen=True)
class Prediction:
    """`what` of `setup` in `table`, predicted and measured in the same unit."""

    table: str
    setup: str
    what: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """0 if both are equal, 0.1 if the prediction is 10 % too high."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Curve:
    """The all-reduces of one set-up, from a table with a row per size: bytes → seconds."""

    table: str
    setup: str
    world_size: int
    seconds: dict[int, float]

    def fit(self, *left_out: int) -> Measured:
        sizes = [size for size in self.seconds if size not in left_out]
        return fit(sizes, [self.seconds[size] for size in sizes], self.world_size)

    def prediction(self, size: int, seconds: float) -> Prediction:
        return Prediction(self.table, self.setup, _size(size), seconds, self.seconds[size])


# All-reduces


@cache
def curves() -> tuple[Curve, ...]:
    """Every set-up whose all-reduces were measured at several sizes."""
    return tuple(_curves())


def _curves() -> Iterator[Curve]:
    for table in sources():
        rows = read(table)
        if "setup" not in rows[0] or "size_bytes" not in rows[0]:
            continue
        for setup, group in groupby(rows, lambda row: row["setup"]):
            own = list(group)
            times = {row["size_bytes"]: _seconds(row) for row in own if not _rounded_away(row)}
            yield Curve(table, setup, own[0]["gpus"], times)


def curve_of(setup: str) -> Curve:
    """The first one of that name."""
    return next(each for each in curves() if each.setup == setup)


def from_other_sizes(curve: Curve) -> dict[int, Prediction]:
    """Each size from a fit of all others. The first and the last one lie outside of their fit."""
    return {
        size: curve.prediction(size, curve.fit(size).all_reduce_seconds(size))
        for size in curve.seconds
    }


def half_tables() -> list[list[Prediction]]:
    """Each size from 1 MiB up, in tables of every other size, which have four at least.

    The neighbours of what is left out are a factor of 16 apart, not of 4 as in a whole table.
    """
    halves = (
        replace(curve, seconds=dict(sorted(curve.seconds.items())[first::2]))
        for curve in curves()
        for first in (0, 1)
    )
    return [
        [each for size, each in from_other_sizes(half).items() if size >= MIB]
        for half in halves
        if len(half.seconds) >= 4
    ]


def from_hardware(curve: Curve) -> dict[int, Prediction]:
    """Each size from data sheets: `HARDWARE` and `ASSUMED`; nothing for any other set-up."""
    network = (HARDWARE | ASSUMED).get(curve.setup)
    if network is None:
        return {}
    return {
        size: curve.prediction(size, network.all_reduce_seconds(size, curve.world_size))
        for size in curve.seconds
    }


HARDWARE = {
    "a100_8gpu": NODES["DGX A100"],
    "a100_16gpu_efa": NODES["p4de"],
    "h100_8gpu": NODES["DGX H100"],
    "h100_16gpu_efa": NODES["p5"],
    "h200_8gpu": NODES["DGX H100"],
    "b200_8gpu": NODES["DGX B200"],
    "b200_16gpu_roce": NODES["DGX B200"],
    "b200_32gpu": NODES["p6-b200"],
}
"""The set-ups whose NVLink and network cards are stated: `sources.toml` and data sheets."""

ASSUMED = {
    "a100_16gpu_infiniband": NODES["DGX A100"],
    "a100_32gpu_sharp": NODES["DGX A100"],
    "h100_16gpu_infiniband": NODES["DGX H100"],
    "h100_64gpu_sharp": NODES["DGX H100"],
    "b200_16gpu_infiniband": NODES["DGX B200"],
}
"""InfiniBand nodes whose network cards are not stated, taken for the DGX of the same GPU."""

NO_DGX = ("a100_32gpu_sharp",)
"""Of `ASSUMED`, what is no DGX: it is slower than one. Later job files of its owner, CoreWeave,
name four cards for nodes of A100, eight for H100. Four cards could not send that fast in a ring or
tree: the InfiniBand switches add (SHARP), which no algorithm here does between nodes."""

SHEETS = (
    ("from 1 GiB up", GIB, 64 * GIB),
    ("from 32 MiB to 1 GiB", 32 * MIB, GIB),
    ("from 1 to 32 MiB", MIB, 32 * MIB),
    ("below 1 MiB", 0, MIB),
)
"""Sizes, from and to below so many bytes. What data sheets say is judged in the first alone."""


def _size(size: int) -> str:
    for unit, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", 1024)):
        if size >= factor:
            return f"{size / factor:g} {unit}"
    return f"{size} B"


def _seconds(row: Row) -> float:
    """The shorter of out-of-place and in-place, since whatever disturbs can only add time."""
    times = [row[name] for name in ("time_us", "time_in_place_us") if row.get(name)]
    if times:
        return float(min(times)) / 1e6
    bandwidth = row.get("algbw_gb_per_s")
    if bandwidth is None:
        bandwidth = row["busbw_gb_per_s"] / volume("ring", row["gpus"])
    return float(row["size_bytes"] / bandwidth / 1e9)


def _rounded_away(row: Row) -> bool:
    """Whether only a bandwidth was printed, with two decimals, and these say next to nothing."""
    if row.get("time_us"):
        return False
    bandwidth = row.get("algbw_gb_per_s") or row["busbw_gb_per_s"]
    return bool(0.005 / bandwidth > ROUNDED)


# Other numbers of ranks


def switch_that_adds() -> list[Prediction]:
    """Bus bandwidth (GB/s) of 4 to 7 GPUs of a node at 8 GiB, from what 8 of them reach.

    Once as a ring and once as NCCL chooses, which adds in the switch where that is faster.
    """
    table = "allreduce_nvlink_sharp_on_off"
    rows = [row for row in read(table) if row["size_bytes"] == 8 * GIB]
    found = []
    for gpu in sorted({row["gpu"] for row in rows}):
        own = {(row["gpus"], row["nvlink_sharp"]): row["busbw_gb_per_s"] for row in rows
               if row["gpu"] == gpu}  # fmt: skip
        ring = Link(0, 1e-9 / own[8, "off"])
        adding = Link(0, 1e-9 / own[8, "default"] * volume("ring", 8) / volume("switch", 8))
        node = Network(8, ring, switch=adding)
        for (gpus, switch), measured in own.items():
            if gpus < 8:
                algorithm = "ring" if switch == "off" else None
                time = node.all_reduce_seconds(8 * GIB, gpus, algorithm)
                predicted = 8 * GIB * volume("ring", gpus) / time / 1e9
                setup = f"{gpu}, switch {switch}"
                found.append(Prediction(table, setup, f"{gpus} GPUs, GB/s", predicted, measured))
    return found


def two_levels() -> tuple[float, float]:
    """Seconds by maximum and sum for 4 GiB on 4 nodes of 8 B200, by the bandwidths of data sheets.

    `b200_32gpu` measured it.
    """
    node = Network(8, Link(0, 1 / 900e9), Link(0, 1 / 50e9), rails=8)
    return node.two_level_bounds(4 * GIB, 32)


GRADIENTS = {"ResNet-50": 25_557_032, "BERT-Base": 110_111_042, "BERT-Large": 336_232_258}
"""Parameters: ResNet-50 as in torchvision, `BertForPreTraining` of the sizes in Devlin et al.,
2019, with the vocabulary of 30,528 that the benchmark's `bert_benchmark.py` rounds to."""

LINKS = {
    "10GbE with TCP/IP": "rtx2080ti_32gpu_10gbe",
    "100GbIB with RDMA": "rtx2080ti_32gpu_100gbib",
}


def plain_training() -> list[Prediction]:
    """Samples per second on several nodes that train without overlap.

    A step is that of one GPU and then an all-reduce of all float32 gradients, which another table
    measured on the same hosts (`LINKS`). Within a node the link is another one: left out.
    """
    table = "data_parallel_10gbe_100gb_32gpu"
    rows = [row for row in read(table) if row["method"] == "BSP-A2A"]
    alone = {row["model"]: row["samples_per_s_total"] for row in rows if row["gpus"] == 1}
    found = []
    for row in rows:
        if row["nodes"] == 1 or row["link_between_nodes"] not in LINKS:
            continue
        link, batch = curve_of(LINKS[row["link_between_nodes"]]).fit(), row["batch_per_gpu"]
        message = link.all_reduce_seconds(4 * GRADIENTS[row["model"]], row["gpus"])
        predicted = row["gpus"] * batch / (batch / alone[row["model"]] + message)
        setup = f"{row['model']}, {row['link_between_nodes']}"
        what = f"{row['gpus']} GPUs, samples/s"
        found.append(Prediction(table, setup, what, predicted, row["samples_per_s_total"]))
    return found


def playbook(known: int = 64) -> list[Prediction]:
    """Tokens per second and GPU on 8 to 256 GPUs, from those on up to `known`.

    A step is a constant and a latency for each of the N - 1 hops of a ring. The constant holds the
    bytes too: from 8 ranks on they grow by a seventh at most. The two are fitted, since the source
    states neither model nor GPUs.
    """
    table = "dp_scaling_ultrascale_playbook"
    rows = read(table)
    hops = np.array([row["gpus"] - 1 for row in rows])
    rates = np.array([row["tokens_per_s_per_gpu"] for row in rows])
    fitted = hops < known
    slope, start = np.polyfit(hops[fitted], 1 / rates[fitted], 1, w=rates[fitted])
    predicted = (1 / (start + slope * hops)).tolist()
    return [
        Prediction(
            table, f"{row['gpus']} GPUs", "tokens/s per GPU", rate, row["tokens_per_s_per_gpu"]
        )
        for row, rate in zip(rows, predicted, strict=True)
    ]


# The report


def report() -> tuple[list[str], list[str]]:
    """All predictions beside what was measured, as lines; and the lines that break a bound."""
    lines: list[str] = []
    judged: list[tuple[str, list[Prediction], float, float]] = []
    for curve in curves():
        learned = from_other_sizes(curve)
        lines += ["", *_rows(curve, learned, from_hardware(curve))]
        name, middle = f"{curve.table}, {curve.setup}", MEDIANS.get(curve.setup, MEDIAN)
        large = [each for size, each in learned.items() if size >= MIB]
        small = [each for size, each in learned.items() if size < MIB]
        judged.append((f"{name}, from 1 MiB up", large, WORST, middle))
        judged.append((f"{name}, below 1 MiB", small, WORST_BELOW, WORST_BELOW))
    for name, setups, worst in (
        ("data sheets", HARDWARE, WORST),
        ("assumed DGX", ASSUMED.keys() - NO_DGX, WORST_ASSUMED),
        ("assumed DGX, but none", NO_DGX, 1.0),
    ):
        for sizes, first, last in SHEETS:
            bound = worst if first == GIB else 1.0
            judged.append((f"{name}, {sizes}", _by_sheet(setups, first, last), bound, bound))
    halves = half_tables()
    broken = sum(not within(half, WORST, MEDIAN) for half in halves)
    name = f"half tables, from 1 MiB up ({broken} of {len(halves)} break the bounds of whole ones)"
    judged.append((name, [each for half in halves for each in half], 1.0, 1.0))
    for name, predictions, worst in (
        ("fewer GPUs on one node, with and without a switch that adds", switch_that_adds(), WORST),
        ("plain training, from one GPU and the link", plain_training(), WORST_TRAINING),
        ("data parallel decay, from 8 to 64 GPUs", playbook(), 1.0),
    ):
        lines += ["", f"{name} ({predictions[0].table})", *map(_row, predictions)]
        judged.append((name, predictions, worst, worst))
    summaries = [(summary(each[0], each[1]), within(*each[1:])) for each in judged if each[1]]
    lines += ["", _two_levels(), "", *(line for line, _ in summaries)]
    return lines, [line for line, holds in summaries if not holds]


def _by_sheet(setups: Collection[str], first: int, last: int) -> list[Prediction]:
    return [
        each
        for curve in curves()
        if curve.setup in setups
        for size, each in from_hardware(curve).items()
        if first <= size < last
    ]


def within(predictions: Sequence[Prediction], worst: float, middle: float) -> bool:
    """Whether no error is larger than `worst`, and the median not than `middle`."""
    errors = [abs(each.error) for each in predictions]
    return max(errors) <= worst and median(errors) <= middle


def summary(name: str, predictions: Sequence[Prediction]) -> str:
    worst = max(predictions, key=lambda each: abs(each.error))
    middle = median(abs(each.error) for each in predictions)
    return (
        f"{name}: {len(predictions)} predictions, median error {middle:.1%}, "
        f"worst {worst.error:+.1%} ({worst.setup}, {worst.what})"
    )


def _two_levels() -> str:
    low, high = (1e3 * time for time in two_levels())
    measured = 1e3 * curve_of("b200_32gpu").seconds[4 * GIB]
    return (
        f"two levels, 4 nodes of 8 B200, 4 GiB: {low:.1f} to {high:.1f} ms by maximum and sum, "
        f"measured {measured:.2f} ms"
    )


def _row(each: Prediction) -> str:
    numbers = f"{each.predicted:>10,.1f}{each.measured:>10,.1f}{each.error:>+8.1%}"
    return f"{each.setup:<32}{each.what:<20}{numbers}"


def _rows(
    curve: Curve, learned: dict[int, Prediction], computed: dict[int, Prediction]
) -> Iterator[str]:
    yield f"{curve.setup}, {curve.world_size} GPUs ({curve.table}), microseconds"
    heading = f"{'bytes':>12} {'measured':>10} {'predicted':>10} {'error':>7}"
    yield heading + (f" {'data sheet':>11} {'error':>7}" if computed else "")
    for size, each in learned.items():
        line = f"{size:>12} {each.measured * 1e6:>10.1f} {each.predicted * 1e6:>10.1f}"
        line += f" {each.error:>+7.1%}"
        if sheet := computed.get(size):
            line += f" {sheet.predicted * 1e6:>11.1f} {sheet.error:>+7.1%}"
        yield line


def main() -> int:
    lines, broken = report()
    print(__doc__)
    print("\n".join(lines))
    print("\nOut of bounds:" if broken else "\nNothing is out of bounds.", *broken, sep="\n")
    return bool(broken)
