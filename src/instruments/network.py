"""How long NCCL's all-reduce takes: from data sheets, or from a measured table.

Two classes with one method, `all_reduce_seconds(num_bytes, world_size)`:

- `Network` computes it from the nodes: alpha and beta of a GPU's link and of a network
  card, and how many cards there are. Messages of 1 GiB and more come out right to a
  tenth, smaller ones roughly.
- `Measured`, made by `fit_table`, is a table that somebody measured: alpha and beta
  change with the size of the message. It is right between the sizes of the table and
  near them, and follows the algorithm's formula to other numbers of ranks. The closer
  the sizes, the better: they should double.

What `Network` leaves out, and a table contains: with the size of the message NCCL
changes the protocol (LL, LL128, Simple), the algorithm and the number of channels
(src/graph/tuning.cc, src/enqueue.cc). A tuner plug-in, such as a cloud's, may choose
others (plugins/tuner). InfiniBand switches may add (SHARP, through a CollNet plug-in):
then nodes send less than in a ring or tree.

64 H100 in eight nodes, then 32 GPUs whose links were measured with 16:

>>> round(1e3 * NODES["DGX H100"].all_reduce_seconds(25 * 2**20, 64), 2)
0.34
>>> table = fit_table([2**20, 2**25, 2**30], [83e-6, 276e-6, 4.5e-3], world_size=16)
>>> round(1e3 * table.all_reduce_seconds(25 * 2**20, 32), 2)
0.37

`python -m instruments.predictions` prints both beside all that others measured.
"""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from instruments.cost import Link, check_amounts, check_counts

ALGORITHMS = ("ring", "tree", "switch")

LAUNCH = 7e-6
"""Seconds before the first byte moves (NCCL, src/graph/tuning.cc, `baseLat`: 6.6 to 14
µs)."""

TREE = 0.92
"""Of the bandwidth of a ring, what a tree reaches (NCCL, src/graph/tuning.cc)."""

FILL = 4
"""Latencies that chunks cost at most; the one number here that was chosen to fit, on 17
published set-ups at once. Between 3 and 8 it matters little."""

VERY_LONG = 2**40
"""Bytes beside which no latency counts."""


def volume(algorithm: str, world_size: int) -> float:
    """Bytes that the busiest port sends, over the bytes of the tensor.

    - ring: 2 (N - 1) / N (nccl-tests, doc/PERFORMANCE.md);
    - tree: 2. NCCL cuts the tensor into halves for two trees, in which every rank has
      two children once at most; of two ranks each sends one half up and one down
      (Sanders, Speck and Träff, "Two-tree algorithms", 2009);
    - switch: (N + 1) / N. The switch reads the tensor from every rank, adds, and takes
      one N-th of the sum from each to hand it to all: NVLink SHARP (nccl-tests,
      doc/PERFORMANCE.md).
    """
    _check(algorithm, world_size)
    if world_size == 1:
        return 0.0
    if algorithm == "ring":
        return 2 * (world_size - 1) / world_size
    if algorithm == "tree":
        return 1.0 if world_size == 2 else 2.0
    return (world_size + 1) / world_size


def steps(algorithm: str, world_size: int) -> int:
    """Messages that wait for one another.

    2 (N - 1) in a ring, 2 ⌈log2 N⌉ in a tree, 2 by switch (Thakur, Rabenseifner and
    Gropp, IJHPCA 2005).
    """
    _check(algorithm, world_size)
    if world_size == 1:
        return 0
    if algorithm == "ring":
        return 2 * (world_size - 1)
    if algorithm == "tree":
        return 2 * (world_size - 1).bit_length()
    return 2


class Parts(NamedTuple):
    """Seconds of an all-reduce: they add up to all of it.

    Attributes:
        latency: The launch and the hops, as of an empty tensor.
        transfer: The bytes at the narrowest place, as in a very long tensor.
        chunks: What it costs that pieces of the tensor wait for one another.
    """

    latency: float
    transfer: float
    chunks: float


@dataclass(frozen=True)
class Network:
    """Equal nodes of GPUs. All links are those of one direction.

    What a program reaches of a data sheet's bandwidth: about 0.8 of NVLink, 0.65 of
    PCIe from GPU to GPU and 0.35 to 0.5 where the way leads through the host's
    memory, 0.95 of a network card. A hop takes about 0.6 µs over NVLink, 1 µs over
    PCIe, 5 µs over InfiniBand (NCCL, src/graph/tuning.cc, `hwLat`), and 25 to 75 µs
    over EFA and TCP (published tables).

    Attributes:
        ranks_per_node: GPUs of a node.
        inside: From one GPU to the others of its node. alpha: seconds per hop of a
            small message; beta: seconds per byte, of what a program reaches.
        rail: One network card; None for one node alone.
        rails: Network cards of a node. What a node sends is what all of them send
            together.
        switch: A GPU's link while the node's switch adds (NVLink SHARP); None where it
            cannot.
    """

    ranks_per_node: int
    inside: Link
    rail: Link | None = None
    rails: int = 1
    switch: Link | None = None

    def __post_init__(self) -> None:
        check_counts(ranks_per_node=self.ranks_per_node, rails=self.rails)

    def all_reduce_seconds(
        self, num_bytes: float, world_size: int, algorithm: str | None = None
    ) -> float:
        """Seconds with the fastest algorithm, as NCCL chooses, or with `algorithm`.

        `world_size` fills one node in part, or whole nodes.

        Raises:
            ValueError: Nodes that are filled in part, or have not the switch or the
                card they need.
        """
        check_amounts(num_bytes=num_bytes)
        per_node, nodes = self._shape(world_size)
        if world_size == 1:
            return 0.0
        if algorithm == "switch" and self.switch is None:
            raise ValueError("the switch of these nodes does not add: switch is None")
        chosen = ALGORITHMS if algorithm is None else (algorithm,)
        return min(
            self._seconds(num_bytes, per_node, nodes, name)
            for name in chosen
            if name != "switch" or self.switch is not None
        )

    def parts(self, num_bytes: float, world_size: int) -> Parts:
        """What the time of the fastest algorithm is made of."""

        def seconds(size: float, algorithm: str) -> float:
            return self.all_reduce_seconds(size, world_size, algorithm)

        possible = [
            name for name in ALGORITHMS if name != "switch" or self.switch is not None
        ]
        fastest = min(possible, key=lambda name: seconds(num_bytes, name))
        latency = seconds(0, fastest)
        long = seconds(2 * VERY_LONG, fastest) - seconds(VERY_LONG, fastest)
        transfer = num_bytes / VERY_LONG * long
        whole = seconds(num_bytes, fastest)
        return Parts(latency, transfer, whole - latency - transfer)

    def two_level_bounds(
        self,
        num_bytes: float,
        world_size: int,
    ) -> tuple[float, float]:
        """Seconds between which a two-level all-reduce lies.

        They are the maximum and the sum of its two levels: reduce-scatter within nodes,
        all-reduce of each part between nodes, all-gather within nodes (Cho et al.,
        "BlueConnect", MLSys 2019). If the two levels work on different parts of the
        tensor at once, the slower one counts; if one waits for the other, both do
        (scaling-book, "How to Think About GPUs").
        """
        check_amounts(num_bytes=num_bytes)
        per_node, nodes = self._shape(world_size)
        within = _time(num_bytes, "ring", per_node, self.inside)
        between = _time(num_bytes, "ring", nodes, self._node_link())
        return max(within, between), within + between

    def _seconds(self, num_bytes: float, per_node: int, nodes: int, name: str) -> float:
        """One algorithm on `nodes` nodes of `per_node` ranks each."""
        inside = self.switch if name == "switch" and self.switch else self.inside
        card = self._node_link()
        if name == "ring":  # one ring through all ranks, per rail
            world_size = per_node * nodes
            hops = steps("ring", world_size)
            crossing = hops * nodes / world_size if nodes > 1 else 0.0
            latency = (hops - crossing) * inside.alpha + crossing * card.alpha
            slowest = max(inside.beta, card.beta if nodes > 1 else 0.0)
            transfer = volume("ring", world_size) * num_bytes * slowest
            return _in_chunks(LAUNCH + latency, transfer)
        # within a node a chain, or the switch; between nodes two trees
        within = 2 * (per_node - 1) if name == "tree" else steps("switch", per_node)
        latency = within * inside.alpha + steps("tree", nodes) * card.alpha
        busiest_inside = volume(name, per_node) * inside.beta
        busiest_card = volume("tree", nodes) * card.beta
        busiest = max(busiest_inside, busiest_card)
        reached = TREE if name == "tree" else 1.0
        return _in_chunks(LAUNCH + latency, num_bytes * busiest / reached)

    def _node_link(self) -> Link:
        """What all network cards of a node are together."""
        rail = self.rail or Link(0, 0)
        return Link(rail.alpha, rail.beta / self.rails)

    def _shape(self, world_size: int) -> tuple[int, int]:
        """Ranks of each node, and nodes."""
        check_counts(world_size=world_size)
        if world_size <= self.ranks_per_node:
            return world_size, 1
        if self.rail is None:
            raise ValueError(
                f"{world_size} ranks need several nodes, which need a rail"
            )
        if world_size % self.ranks_per_node:
            raise ValueError(
                f"{world_size} ranks do not fill nodes of {self.ranks_per_node}: "
                "give a multiple"
            )
        return self.ranks_per_node, world_size // self.ranks_per_node


def gpu_node(
    nvlink: float, card: float, cards: int = 8, hop: float = 5e-6, adds: bool = True
) -> Network:
    """A node of eight GPUs behind NVSwitch, from data sheets.

    Args:
        nvlink: Bytes per second and direction of one GPU.
        card: The same of one network card.
        cards: Network cards of the node.
        hop: Seconds from node to node; 5 µs over InfiniBand (NCCL, src/graph/tuning.cc,
            `hwLat`).
        adds: Whether its switch adds (NVLink SHARP): from H100 on.

    A program reaches 0.8 of NVLink, a fifth being protocol (nccl-tests, issue 212),
    0.65 of it through a switch that adds (published tables), and 0.95 of a card
    (nccl-tests, issue 290: 46 to 48 of 50 GB/s). A hop over NVLink takes 0.6 µs
    (`hwLat`), one to a switch that adds 3.4 µs, as the smallest messages of one node
    of H100 show.
    """
    return Network(
        8,
        Link(0.6e-6, 1 / (0.8 * nvlink)),
        Link(hop, 1 / (0.95 * card)),
        cards,
        Link(3.4e-6, 1 / (0.65 * nvlink)) if adds else None,
    )


NODES: dict[str, Network] = {
    "DGX A100": gpu_node(300e9, 25e9, adds=False),
    "DGX H100": gpu_node(450e9, 50e9),
    "DGX B200": gpu_node(900e9, 50e9),
    "p4de": gpu_node(300e9, 12.5e9, 4, hop=73e-6, adds=False),
    "p5": gpu_node(450e9, 50e9, hop=25e-6),
    "p6-b200": gpu_node(900e9, 50e9, hop=25e-6),
}
"""Nodes by name, from the data sheets of NVIDIA and the instance types of AWS: a DGX
A100 has 8 cards of 200 Gb/s, DGX H100 (and H200) and B200 have 8 of 400 Gb/s,
p4de.24xlarge has 4 of 100 Gb/s, p5.48xlarge and p6-b200.48xlarge have 8 times 400
Gb/s. A hop over EFA takes what the smallest message of the published tables shows."""


@dataclass(frozen=True)
class Measured:
    """All-reduces as somebody measured them: alpha and beta depend on the size.

    Between two sizes of the table the time is a straight line: the alpha and beta of
    these two. Outside, the line goes on as it was over the last doubling of the size,
    or the first. Make one with `fit_table`.

    Attributes:
        num_bytes: Sizes of the tensors, ascending, at least two.
        seconds: Their times, which never fall.
        world_size: Ranks that took part.
        algorithm: How time grows with the ranks: "ring", "tree" or "switch".
    """

    num_bytes: tuple[float, ...]
    seconds: tuple[float, ...]
    world_size: int
    algorithm: str = "ring"

    def all_reduce_seconds(
        self, num_bytes: float, world_size: int | None = None
    ) -> float:
        """Seconds on `world_size` ranks; on those of the table where it is None."""
        check_amounts(num_bytes=num_bytes)
        if world_size is not None and world_size != self.world_size:
            return self.on(world_size).all_reduce_seconds(num_bytes)
        if num_bytes < self.num_bytes[0]:
            return self._before_the_first(num_bytes)
        if num_bytes > self.num_bytes[-1]:
            return self._after_the_last(num_bytes)
        return float(np.interp(num_bytes, self.num_bytes, self.seconds))

    def _before_the_first(self, num_bytes: float) -> float:
        first = self.num_bytes[0]
        doubled = [i for i, size in enumerate(self.num_bytes) if size >= 2 * first]
        end = doubled[0] if doubled else -1
        rise = self.seconds[end] - self.seconds[0]
        beta = rise / (self.num_bytes[end] - first)
        through_zero = self.seconds[0] / first
        return self.seconds[0] - (first - num_bytes) * min(beta, through_zero)

    def _after_the_last(self, num_bytes: float) -> float:
        last = self.num_bytes[-1]
        halves = [i for i, size in enumerate(self.num_bytes) if 2 * size <= last]
        start = halves[-1] if halves else 0
        rise = self.seconds[-1] - self.seconds[start]
        beta = rise / (last - self.num_bytes[start])
        if beta == 0:
            beta = self.seconds[-1] / last
        return self.seconds[-1] + (num_bytes - last) * beta

    def on(self, world_size: int) -> "Measured":
        """The same links with another number of ranks.

        What the bytes take at the best rate of the table grows with the algorithm's
        `volume`, the rest of the time with its `steps`.
        """
        name = self.algorithm
        later = steps(name, world_size) / steps(name, self.world_size)
        longer = volume(name, world_size) / volume(name, self.world_size)
        table = list(zip(self.num_bytes, self.seconds, strict=True))
        beta = min(time / size for size, time in table)
        times = [
            later * (time - size * beta) + longer * size * beta for size, time in table
        ]
        return Measured(self.num_bytes, tuple(_never_falling(times)), world_size, name)


def fit_table(
    num_bytes: Sequence[float],
    seconds: Sequence[float],
    world_size: int,
    algorithm: str = "ring",
) -> Measured:
    """The link that a table of all-reduces shows.

    `seconds[i]` is the time of a tensor of `num_bytes[i]`. Nothing is assumed of the
    link but that a larger tensor never takes less time. Where the table says so, the
    median of the times in question stands for all of them: the non-decreasing curve
    with the smallest sum of absolute errors, so that a single outlier changes
    nothing. A size that was measured several times counts with the median. For a
    table of bus bandwidths the times are `num_bytes * volume("ring", world_size) /
    bandwidth`.

    Raises:
        ValueError: Not one time per size, fewer than two sizes, a size or time that is
            not positive, one rank, or no such algorithm.
    """
    _check(algorithm, world_size)
    if world_size == 1:
        raise ValueError(
            "an all-reduce of one rank uses no link: measure two ranks at least"
        )
    if len(num_bytes) != len(seconds) or len(set(num_bytes)) < 2:
        raise ValueError(
            "fit_table needs one time per size and two different sizes at least, not "
            f"{len(num_bytes)} sizes ({len(set(num_bytes))} different) and "
            f"{len(seconds)} times"
        )
    check_amounts(smallest_size=min(num_bytes), shortest_time=min(seconds))
    if not (min(num_bytes) > 0 and min(seconds) > 0):
        raise ValueError("every size and every time must be more than 0")
    times = defaultdict(list)
    for size, time in zip(num_bytes, seconds, strict=True):
        times[size].append(time)
    sizes = sorted(times)
    middle = [_median(times[size]) for size in sizes]
    return Measured(tuple(sizes), tuple(_never_falling(middle)), world_size, algorithm)


EXPECTED = "expected all that nccl-tests' all_reduce_perf prints"


def read_nccl_tests(text: str) -> Measured:
    """The link that the output of `all_reduce_perf` shows.

    The columns are found by the names above them, which differ between versions. Of the
    times out of place and in place the shorter one counts. A launcher may have put in
    front of each line which rank printed it.

    Raises:
        ValueError: Not such an output, in one line that says what was expected.
    """
    lines = [_TAG.sub("", line) for line in text.splitlines()]
    columns = _nccl_columns(lines)
    found = {match[1] for line in lines if (match := _RANK.match(line))}
    ranks = len(found)
    if ranks < 2:
        raise ValueError(
            f'{EXPECTED}: of the lines "# Rank 0 …" {ranks} found, 2 or more needed'
        )
    sizes: list[float] = []
    seconds: list[float] = []
    for number, line in enumerate(lines, 1):
        if not _ROW.match(line):
            continue
        size, microseconds = _nccl_row(line.split(), columns, number, ranks)
        if size > 0:
            sizes.append(size)
            seconds.append(microseconds * 1e-6)
    if len(set(sizes)) < 2:
        raise ValueError(
            f"{EXPECTED}: two sizes or more needed, {len(set(sizes))} found"
        )
    return fit_table(sizes, seconds, ranks)


_TAG = re.compile(r"^(\[\S*\d+,\d+\]<\w+>: ?|\d+: )")
_RANK = re.compile(r"\s*#\s+Rank\s+(\d+)")
_ROW = re.compile(r"\s*\d+\s+\d+\s")


def _nccl_columns(lines: Sequence[str]) -> list[str]:
    for line in lines:
        words = line.lstrip("# \t").split()
        if {"size", "time", "algbw", "busbw"} <= set(words):
            return words
    raise ValueError(
        f'{EXPECTED}: no line "# size count type redop … time algbw busbw" found'
    )


def _nccl_row(
    row: Sequence[str], columns: Sequence[str], number: int, ranks: int
) -> tuple[float, float]:
    """Bytes, and microseconds."""
    if len(row) != len(columns):
        raise ValueError(
            f"{EXPECTED}: line {number} has {len(row)} columns, the header "
            f"{len(columns)}"
        )
    try:
        size = float(row[columns.index("size")])
        algbw = float(row[columns.index("algbw")])
        busbw = float(row[columns.index("busbw")])
        named = zip(columns, row, strict=True)
        time = min(float(value) for name, value in named if name == "time")
    except ValueError:
        raise ValueError(f"{EXPECTED}: line {number} has no time") from None
    if not time > 0:
        raise ValueError(f"{EXPECTED}: line {number} has no time")
    factor = volume("ring", ranks)
    if abs(busbw - factor * algbw) > 0.02:  # both are printed with two decimals
        raise ValueError(
            f"{EXPECTED}: line {number} is not of an all-reduce of {ranks} ranks, "
            f"whose busbw is {factor:.2f} times algbw"
        )
    return size, time


def _never_falling(times: Sequence[float]) -> list[float]:
    """The closest sequence that never falls.

    Pools that violate it are joined to their median (Ayer et al., "An empirical
    distribution function for sampling with incomplete information", 1955, with medians:
    Robertson and Waltman, 1968).
    """
    pools: list[list[float]] = []
    for time in times:
        pools.append([time])
        while len(pools) > 1 and _median(pools[-2]) > _median(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    return [_median(pool) for pool in pools for _ in pool]


def _median(times: Sequence[float]) -> float:
    """The lower one where there are two: whatever else runs can only add time."""
    return sorted(times)[(len(times) - 1) // 2]


def _in_chunks(latency: float, transfer: float) -> float:
    """Seconds of a tensor that goes through all hops in chunks.

    With large chunks the last hop waits long for the first one, with small ones every
    chunk pays its latency. The best size takes latency + transfer + 2 √(latency ·
    transfer) (Sanders, Speck and Träff, "Two-tree algorithms", 2009). Since NCCL's
    chunks do not grow with the tensor, what they cost stops growing at `FILL`
    latencies.
    """
    chunks = min(2 * math.sqrt(latency * transfer), FILL * latency)
    return latency + transfer + chunks


def _time(num_bytes: float, algorithm: str, world_size: int, link: Link) -> float:
    return (
        steps(algorithm, world_size) * link.alpha
        + volume(algorithm, world_size) * num_bytes * link.beta
    )


def _check(algorithm: str, world_size: int) -> None:
    check_counts(world_size=world_size)
    if algorithm not in ALGORITHMS:
        raise ValueError(
            f"algorithm must be one of {', '.join(ALGORITHMS)}, not {algorithm!r}"
        )
