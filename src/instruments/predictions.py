"""What `instruments.network` predicts beside what others measured.

- An all-reduce is predicted from the other sizes of its table ("predicted"). What is
  predicted has not been seen, but its neighbours have, a factor of four apart: this is
  interpolation. In tables of every other size they are a factor of 16 apart, and it is
  worse ("half tables").
- It is predicted from data sheets ("data sheet"). No table is used, but a few numbers
  of `instruments.network`, the same for all nodes, were chosen with these tables at
  hand: how much of NVLink a program reaches, `FILL`, and what a hop over EFA takes.
  Where the source does not state the network cards, they are those of a DGX of the
  same GPU ("assumed DGX").
- Training is predicted from one GPU's time and a table of the link, the bandwidth of
  fewer GPUs from that of eight, the decay to 128 and 256 GPUs from 8 to 64.

`python -m instruments.predictions` prints all of them.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from statistics import median

import numpy as np

from instruments.cost import Link
from instruments.measurements import Row, read, sources
from instruments.network import NODES, Measured, Network, fit_table, volume
from miniddp.bucket import MIB

GIB = 2**30

# The largest errors that are allowed

MEDIAN = 0.05
"""The median of a set-up from 1 MiB up."""

WORST = 0.25
"""The worst of a set-up from 1 MiB up."""

WORST_BELOW = 0.5
"""The worst of a set-up below 1 MiB."""

WORST_TRAINING = 0.1
"""The worst of a training."""

WORST_ASSUMED = 0.1
"""The worst from 1 GiB up of nodes that are taken for a DGX."""

MEDIANS = {"b200_8gpu": 0.06}
"""Set-ups with a larger median. The time of eight B200 stands still from 8 to 16 MiB,
and bus bandwidth leaps by 42 % from 64 to 128 MiB and by 13 % from 4 to 8 GiB: no
neighbour says so."""

ANY = 1.0
"""Of what is shown rather than judged: a factor of two."""

ROUNDED = 0.1
"""A bandwidth that its source prints in so few digits is no measurement: 10 % up or
down."""


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

    @property
    def percent(self) -> float:
        """The size of the error in per cent."""
        return 100 * abs(self.error)


@dataclass(frozen=True)
class Curve:
    """The all-reduces of one set-up, a row per size in its table: bytes → seconds."""

    table: str
    setup: str
    world_size: int
    seconds: dict[int, float]

    def link(self, *left_out: int) -> Measured:
        """The link that the table shows without the sizes that are left out."""
        sizes = [size for size in self.seconds if size not in left_out]
        return fit_table(sizes, [self.seconds[size] for size in sizes], self.world_size)

    def prediction(self, size: int, seconds: float) -> Prediction:
        return Prediction(
            self.table, self.setup, _size(size), seconds, self.seconds[size]
        )


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
            of_setup = list(group)
            times = {
                row["size_bytes"]: _seconds(row)
                for row in of_setup
                if not _rounded_away(row)
            }
            yield Curve(table, setup, of_setup[0]["gpus"], times)


def curve_of(setup: str) -> Curve:
    """The first one of that name."""
    return next(curve for curve in curves() if curve.setup == setup)


def from_other_sizes(curve: Curve) -> dict[int, Prediction]:
    """Each size from a fit of all others.

    The first and the last one lie outside of their fit.
    """
    return {
        size: curve.prediction(size, curve.link(size).all_reduce_seconds(size))
        for size in curve.seconds
    }


def half_tables() -> list[list[Prediction]]:
    """Each size from 1 MiB up, in tables of every other size, which have four at least.

    The neighbours of what is left out are a factor of 16 apart, not of 4 as in a
    whole table.
    """
    found = []
    for curve in curves():
        points = sorted(curve.seconds.items())
        for half in (points[0::2], points[1::2]):
            if len(half) >= 4:
                by_size = from_other_sizes(replace(curve, seconds=dict(half)))
                found.append(_of_sizes(by_size, MIB))
    return found


def _of_sizes(
    by_size: dict[int, Prediction], first: float, last: float = math.inf
) -> list[Prediction]:
    """Those of sizes from `first` to below `last` bytes."""
    return [found for size, found in by_size.items() if first <= size < last]


def from_hardware(curve: Curve) -> dict[int, Prediction]:
    """Each size from data sheets; nothing for a set-up without one.

    Those of `HARDWARE` and `ASSUMED` have one.
    """
    network = (HARDWARE | ASSUMED).get(curve.setup)
    if network is None:
        return {}
    return {
        size: curve.prediction(size, network.all_reduce_seconds(size, curve.world_size))
        for size in curve.seconds
    }


def times_promised(smallest: int) -> float:
    """How many times as long as data sheets promise an all-reduce took at most.

    Of those from `smallest` bytes to 1 GiB, above which data sheets are right.
    """
    found = []
    for curve in curves():
        found += _of_sizes(from_hardware(curve), smallest, GIB)
    return max(1 / (1 + prediction.error) for prediction in found)


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
"""The set-ups whose NVLink and network cards `sources.toml` and data sheets state."""

ASSUMED = {
    "a100_16gpu_infiniband": NODES["DGX A100"],
    "a100_32gpu_sharp": NODES["DGX A100"],
    "h100_16gpu_infiniband": NODES["DGX H100"],
    "h100_64gpu_sharp": NODES["DGX H100"],
    "b200_16gpu_infiniband": NODES["DGX B200"],
}
"""InfiniBand nodes whose cards are not stated, taken for the DGX of the same GPU."""

NO_DGX = ("a100_32gpu_sharp",)
"""Of `ASSUMED`, what is no DGX: it is slower than one. Later job files of its owner,
CoreWeave, name four cards for nodes of A100, eight for H100. Four cards could not
send that fast in a ring or tree: the InfiniBand switches add (SHARP), which no
algorithm here does between nodes."""

SHEETS = (
    ("from 1 GiB up", GIB, 64 * GIB),
    ("from 32 MiB to 1 GiB", 32 * MIB, GIB),
    ("from 1 to 32 MiB", MIB, 32 * MIB),
    ("below 1 MiB", 0, MIB),
)
"""Sizes, from and to below so many bytes. What data sheets say is judged in the first
alone."""


def _size(size: int) -> str:
    for unit, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", 1024)):
        if size >= factor:
            return f"{size / factor:g} {unit}"
    return f"{size} B"


def _seconds(row: Row) -> float:
    """The shorter of out-of-place and in-place: what disturbs can only add time."""
    columns = ("time_us", "time_in_place_us")
    times = [row[name] for name in columns if row.get(name)]
    if times:
        return float(min(times)) / 1e6
    bandwidth = row.get("algbw_gb_per_s")
    if bandwidth is None:
        bandwidth = row["busbw_gb_per_s"] / volume("ring", row["gpus"])
    return float(row["size_bytes"] / bandwidth / 1e9)


def _rounded_away(row: Row) -> bool:
    """Whether only a bandwidth was printed, whose two decimals say next to nothing."""
    if row.get("time_us"):
        return False
    bandwidth = row.get("algbw_gb_per_s") or row["busbw_gb_per_s"]
    return bool(0.005 / bandwidth > ROUNDED)


# Other numbers of ranks


def switch_that_adds() -> list[Prediction]:
    """Bus bandwidth (GB/s) of 4 to 7 GPUs of a node at 8 GiB, from that of 8.

    Once as a ring and once as NCCL chooses, which adds in the switch where that is
    faster.
    """
    table = "allreduce_nvlink_sharp_on_off"
    rows = [row for row in read(table) if row["size_bytes"] == 8 * GIB]
    found = []
    for gpu in sorted({row["gpu"] for row in rows}):
        bandwidths = {
            (row["gpus"], row["nvlink_sharp"]): row["busbw_gb_per_s"]
            for row in rows
            if row["gpu"] == gpu
        }
        ring = Link(0, 1e-9 / bandwidths[8, "off"])
        added = 1e-9 / bandwidths[8, "default"] * volume("ring", 8)
        adding = Link(0, added / volume("switch", 8))
        node = Network(8, ring, switch=adding)
        for (gpus, switch), measured in bandwidths.items():
            if gpus == 8:
                continue
            algorithm = "ring" if switch == "off" else None
            time = node.all_reduce_seconds(8 * GIB, gpus, algorithm)
            predicted = 8 * GIB * volume("ring", gpus) / time / 1e9
            setup = f"{gpu}, switch {switch}"
            what = f"{gpus} GPUs, GB/s"
            found.append(Prediction(table, setup, what, predicted, measured))
    return found


def two_levels() -> tuple[float, float]:
    """Seconds by maximum and sum for 4 GiB on 4 nodes of 8 B200, by data sheets.

    `b200_32gpu` measured it.
    """
    node = Network(8, Link(0, 1 / 900e9), Link(0, 1 / 50e9), rails=8)
    return node.two_level_bounds(4 * GIB, 32)


GRADIENTS = {
    "ResNet-50": 25_557_032,
    "BERT-Base": 110_111_042,
    "BERT-Large": 336_232_258,
}
"""Parameters: ResNet-50 as in torchvision, `BertForPreTraining` of the sizes in Devlin
et al., 2019, with the vocabulary of 30,528 that the benchmark's `bert_benchmark.py`
rounds to."""

LINKS = {
    "10GbE with TCP/IP": "rtx2080ti_32gpu_10gbe",
    "100GbIB with RDMA": "rtx2080ti_32gpu_100gbib",
}
"""Links of the nodes of `TRAININGS`: the set-up that measured their all-reduces."""

TRAININGS = "data_parallel_10gbe_100gb_32gpu"
"""The table of trainings on 1 to 32 GPUs, with overlap and without."""


def plain_training() -> list[Prediction]:
    """Samples per second on several nodes that train without overlap.

    A step is that of one GPU and then an all-reduce of all float32 gradients, which
    another table measured on the same hosts (`LINKS`). Within a node the link is
    another
    one: left out.
    """
    rows = [row for row in read(TRAININGS) if row["method"] == "BSP-A2A"]
    alone = {
        row["model"]: row["samples_per_s_total"] for row in rows if row["gpus"] == 1
    }
    found = []
    for row in rows:
        between = row["link_between_nodes"]
        if row["nodes"] == 1 or between not in LINKS:
            continue
        model = row["model"]
        gpus = row["gpus"]
        batch = row["batch_per_gpu"]
        link = curve_of(LINKS[between]).link()
        message = link.all_reduce_seconds(4 * GRADIENTS[model], gpus)
        predicted = gpus * batch / (batch / alone[model] + message)
        setup = f"{model}, {between}"
        what = f"{gpus} GPUs, samples/s"
        measured = row["samples_per_s_total"]
        found.append(Prediction(TRAININGS, setup, what, predicted, measured))
    return found


def playbook(known: int = 64) -> list[Prediction]:
    """Tokens per second and GPU on 8 to 256 GPUs, from those on up to `known`.

    A step is a constant and a latency for each of the N - 1 hops of a ring. The
    constant holds the bytes too: from 8 ranks on they grow by a seventh at most. The
    two are fitted, since the source states neither model nor GPUs.
    """
    table = "dp_scaling_ultrascale_playbook"
    rows = read(table)
    hops = np.array([row["gpus"] - 1 for row in rows])
    rates = np.array([row["tokens_per_s_per_gpu"] for row in rows])
    fitted = hops < known
    slope, start = np.polyfit(hops[fitted], 1 / rates[fitted], 1, w=rates[fitted])
    predicted = (1 / (start + slope * hops)).tolist()
    found = []
    for row, rate in zip(rows, predicted, strict=True):
        setup = f"{row['gpus']} GPUs"
        measured = row["tokens_per_s_per_gpu"]
        found.append(Prediction(table, setup, "tokens/s per GPU", rate, measured))
    return found


# The report


@dataclass(frozen=True)
class Judged:
    """Predictions, and the largest errors that are allowed of them."""

    name: str
    predictions: list[Prediction]
    worst: float
    median: float

    @property
    def holds(self) -> bool:
        return within(self.predictions, self.worst, self.median)

    @property
    def summary(self) -> str:
        return summary(self.name, self.predictions)


def report() -> tuple[list[str], list[str]]:
    """All predictions beside what was measured, as lines; those that break a bound."""
    lines: list[str] = []
    for curve in curves():
        lines.append("")
        lines += _rows(curve, from_other_sizes(curve), from_hardware(curve))
    others = _not_of_sizes()
    for judged in others:
        lines.append("")
        lines.append(f"{judged.name} ({judged.predictions[0].table})")
        lines += [_row(prediction) for prediction in judged.predictions]
    everything = [*_by_table(), *_by_sheet(), _by_half_table(), *others]
    everything = [judged for judged in everything if judged.predictions]
    lines += ["", _two_levels(), ""]
    lines += [judged.summary for judged in everything]
    return lines, [judged.summary for judged in everything if not judged.holds]


def _by_table() -> Iterator[Judged]:
    for curve in curves():
        learned = from_other_sizes(curve)
        name = f"{curve.table}, {curve.setup}"
        large = _of_sizes(learned, MIB)
        middle = MEDIANS.get(curve.setup, MEDIAN)
        yield Judged(f"{name}, from 1 MiB up", large, WORST, middle)
        small = _of_sizes(learned, 0, MIB)
        yield Judged(f"{name}, below 1 MiB", small, WORST_BELOW, WORST_BELOW)


def _by_sheet() -> Iterator[Judged]:
    for name, setups, worst in (
        ("data sheets", HARDWARE, WORST),
        ("assumed DGX", ASSUMED.keys() - NO_DGX, WORST_ASSUMED),
        ("assumed DGX, but none", NO_DGX, ANY),
    ):
        for sizes, first, last in SHEETS:
            bound = worst if first == GIB else ANY
            found = _of_hardware(setups, first, last)
            yield Judged(f"{name}, {sizes}", found, bound, bound)


def _of_hardware(setups: Collection[str], first: int, last: int) -> list[Prediction]:
    found = []
    for curve in curves():
        if curve.setup in setups:
            found += _of_sizes(from_hardware(curve), first, last)
    return found


def _by_half_table() -> Judged:
    halves = half_tables()
    broken = sum(not within(half, WORST, MEDIAN) for half in halves)
    share = f"{broken} of {len(halves)} break the bounds of whole ones"
    found = [prediction for half in halves for prediction in half]
    return Judged(f"half tables, from 1 MiB up ({share})", found, ANY, ANY)


def _not_of_sizes() -> list[Judged]:
    return [
        Judged(
            "fewer GPUs on one node, with and without a switch that adds",
            switch_that_adds(),
            WORST,
            WORST,
        ),
        Judged(
            "plain training, from one GPU and the link",
            plain_training(),
            WORST_TRAINING,
            WORST_TRAINING,
        ),
        Judged("data parallel decay, from 8 to 64 GPUs", playbook(), ANY, ANY),
    ]


def within(predictions: Sequence[Prediction], worst: float, middle: float) -> bool:
    """Whether no error is larger than `worst`, and the median not than `middle`."""
    errors = [abs(prediction.error) for prediction in predictions]
    return max(errors) <= worst and median(errors) <= middle


def summary(name: str, predictions: Sequence[Prediction]) -> str:
    """The number of predictions, their median and their worst error in one line."""
    worst = max(predictions, key=lambda prediction: abs(prediction.error))
    middle = median(abs(prediction.error) for prediction in predictions)
    return (
        f"{name}: {len(predictions)} predictions, median error {middle:.1%}, "
        f"worst {worst.error:+.1%} ({worst.setup}, {worst.what})"
    )


def _two_levels() -> str:
    low, high = (1e3 * time for time in two_levels())
    measured = 1e3 * curve_of("b200_32gpu").seconds[4 * GIB]
    return (
        f"two levels, 4 nodes of 8 B200, 4 GiB: {low:.1f} to {high:.1f} ms by maximum "
        f"and sum, measured {measured:.2f} ms"
    )


def _row(found: Prediction) -> str:
    numbers = f"{found.predicted:>10,.1f}{found.measured:>10,.1f}{found.error:>+8.1%}"
    return f"{found.setup:<32}{found.what:<20}{numbers}"


def _rows(
    curve: Curve, learned: dict[int, Prediction], computed: dict[int, Prediction]
) -> Iterator[str]:
    yield f"{curve.setup}, {curve.world_size} GPUs ({curve.table}), microseconds"
    heading = f"{'bytes':>12} {'measured':>10} {'predicted':>10} {'error':>7}"
    yield heading + (f" {'data sheet':>11} {'error':>7}" if computed else "")
    for size, found in learned.items():
        measured = f"{found.measured * 1e6:>10.1f}"
        predicted = f"{found.predicted * 1e6:>10.1f} {found.error:>+7.1%}"
        line = f"{size:>12} {measured} {predicted}"
        if sheet := computed.get(size):
            line += f" {sheet.predicted * 1e6:>11.1f} {sheet.error:>+7.1%}"
        yield line


def main() -> int:
    lines, broken = report()
    print(__doc__)
    print("\n".join(lines))
    if broken:
        print("\nOut of bounds:", *broken, sep="\n")
        return 1
    print("\nNothing is out of bounds.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
