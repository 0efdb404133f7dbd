# %% [markdown]
# # All-reduce, the ring
#
# The ring all-reduce of `miniddp`, step by step on small numbers, compared with the library's on
# random data, its bytes counted, and its bandwidth measured beside the library's and beside the
# root-based way. The library is Gloo, or NCCL for the timings if each rank has a GPU of its own.

# %% name="setup"
import re
import time
from collections.abc import Callable
from statistics import median

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist

import miniddp
from book import MUTED, RANK_COLORS, figure, provenance, record, show_ranks, table
from instruments.bench_ring import Timing, bench, fit, ratio, slowest
from miniddp import ring
from miniddp.process import device

TIMED = (2, 4)  # ranks
BACKEND = "nccl" if torch.cuda.device_count() >= max(TIMED) else "gloo"
provenance(device=device(), world_size=[2, 3, 4, 8], backend=sorted({"gloo", BACKEND}))

# %% [markdown]
# ## What all-reduce promises
#
# Rank 0 holds 1, 2, 3, rank 1 holds 10, 20, 30, rank 2 holds 100, 200, 300. The digits of a sum
# tell which ranks have contributed.


# %% name="promise"
def digits(rank: int) -> torch.Tensor:
    return torch.tensor([1.0, 2.0, 3.0]) * 10**rank


def show(tensor: torch.Tensor) -> str:
    return " ".join(f"{value:3.0f}" for value in tensor.tolist())


def promise(rank: int) -> None:
    tensor = digits(rank)
    print("before", show(tensor))
    dist.all_reduce(tensor)
    print("after ", show(tensor))


show_ranks(miniddp.run_ranks(promise, 3))


# %% name="collectives"
def collectives(rank: int) -> dict[str, torch.Tensor | None]:
    broadcast, reduced, all_reduced = digits(rank), digits(rank), digits(rank)
    gathered, scattered = torch.empty(9), torch.empty(1)
    dist.broadcast(broadcast, src=0)
    dist.reduce(reduced, dst=0)
    dist.all_gather_into_tensor(gathered, digits(rank))
    dist.reduce_scatter_tensor(scattered, digits(rank))
    dist.all_reduce(all_reduced)
    return {
        "none yet": digits(rank),
        "broadcast from rank 0": broadcast,
        "reduce to rank 0": reduced if rank == 0 else None,
        "all-gather": gathered,
        "reduce-scatter": scattered,
        "all-reduce": all_reduced,
    }


def cell(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "(undefined)"
    return " ".join(f"{value:.0f}" for value in tensor.tolist())


held = miniddp.run_ranks(collectives, 3)
table(
    [[name, *(cell(rank[name]) for rank in held)] for name in held[0]],
    ["collective", "rank 0", "rank 1", "rank 2"],
    align="llll",
)

# %% [markdown]
# ## Everyone sends first
#
# A blocking send waits for the receiver. Three ranks that all send before they receive wait for
# each other.


# %% name="everyone-sends"
def everyone_sends_first(rank: int) -> None:
    arrived = torch.empty(3)
    dist.send(digits(rank), (rank + 1) % 3)
    dist.recv(arrived, (rank - 1) % 3)


PATIENCE = 4
try:
    miniddp.run_ranks(everyone_sends_first, 3, timeout=PATIENCE)
    raise AssertionError("the ranks must wait for ever")
except miniddp.launch.RanksTimedOut as error:
    stacks = error.stacks
for rank in range(3):
    functions = re.findall(r"line \d+ in (\w+)", stacks[rank])
    assert {"send", "everyone_sends_first"} <= set(functions)
    assert "recv" not in functions
waits = f"after {PATIENCE} s still in send,\n  called by everyone_sends_first"
show_ranks([waits] * 3)

# %% [markdown]
# ## Three ranks, three chunks
#
# The ring, step by step, on the same numbers.


# %% name="walk"
def walk(rank: int) -> list[float]:
    tensor = digits(rank)
    place = ring.Ring()
    chunks = tensor.tensor_split(3)
    print("at first         ", show(tensor))
    for step, (send, receive) in enumerate(ring.reduce_scatter_steps(rank, 3)):
        (arrived,) = ring.exchange([chunks[send]], [torch.empty(1)], place)
        chunks[receive].add_(arrived)
        print(f"reduce-scatter {step}: {show(tensor)}\n  sent {send}, added to {receive}")
    for step, (send, receive) in enumerate(ring.all_gather_steps(rank, 3)):
        list(ring.exchange([chunks[send]], [chunks[receive]], place))
        print(f"all-gather {step}:     {show(tensor)}\n  sent {send}, replaced {receive}")
    return tensor.tolist()


walked = miniddp.run_ranks(walk, 3)
assert walked == [[111, 222, 333]] * 3
show_ranks(walked)

# %% [markdown]
# ## A ring that is wrong
#
# The signs in the all-gather are turned round: what comes from the left is stored as if it came
# from the right. Which data show the mistake?


# %% name="wrong"
def wrong_all_gather_steps(rank: int, size: int) -> list[tuple[int, int]]:
    steps = range(size - 1)
    return [((rank + step) % size, (rank + step + 1) % size) for step in steps]


LENGTH = 12
DATA: dict[str, Callable[[int], torch.Tensor]] = {
    "ones": lambda rank: torch.ones(LENGTH),
    "the rank's number": lambda rank: torch.full((LENGTH,), float(rank)),
    "random": lambda rank: torch.rand(LENGTH, generator=torch.Generator().manual_seed(rank)),
}


def is_right(rank: int, wrong: bool) -> list[bool]:
    if wrong:
        ring.all_gather_steps = wrong_all_gather_steps
    verdicts = []
    for make in DATA.values():
        ours, theirs = make(rank), make(rank)
        ring.all_reduce(ours)
        dist.all_reduce(theirs)
        verdicts.append(torch.allclose(ours, theirs))
    return verdicts


rows = []
for world_size in (2, 3, 4):
    assert all(map(all, miniddp.run_ranks(is_right, world_size, False)))
    passed = [
        all(ranks) for ranks in zip(*miniddp.run_ranks(is_right, world_size, True), strict=True)
    ]
    assert passed == [True, True, world_size == 2]
    rows.append([world_size, *("passes" if each else "fails" for each in passed)])
table(rows, ["ranks", *DATA])

# %% [markdown]
# ## The order of additions
#
# Rank 0 holds 100 million three times, rank 1 minus 100 million, rank 2 holds 1. The exact sum is
# 1. Each chunk of the ring adds in another order.


# %% name="rounding"
def rounding(rank: int) -> list[list[float]]:
    ours = torch.full((3,), [1e8, -1e8, 1.0][rank])
    theirs = ours.clone()
    print("has ", columns(ours))
    ring.all_reduce(ours)
    dist.all_reduce(theirs)
    print("ring", columns(ours))
    print("gloo", columns(theirs))
    return [ours.tolist(), theirs.tolist()]


def columns(tensor: torch.Tensor) -> str:
    return " ".join(f"{value:6g}" for value in tensor.tolist())


rounded = miniddp.run_ranks(rounding, 3)
assert rounded == [rounded[0]] * 3, "the same on all ranks"
assert rounded[0][0] == [0, 0, 1]
show_ranks(rounded)

# %% [markdown]
# ## The same sum as Gloo's
#
# Random data, and lengths from zero to a prime number larger than the number of ranks.


# %% name="correct"
LENGTHS = [0, 1, 2, 3, 4, 5, 1000, 65537]


def compare(rank: int) -> list[float]:
    differences = []
    for length in LENGTHS:
        generator = torch.Generator().manual_seed(100 * rank + length)
        ours = torch.randn(length, generator=generator).to(device())
        theirs = ours.clone()
        ring.all_reduce(ours)
        dist.all_reduce(theirs)
        of_rank_0 = ours.clone()
        dist.broadcast(of_rank_0, src=0)
        assert torch.equal(ours, of_rank_0), "bit for bit the same on all ranks"
        differences.append((ours - theirs).abs().max().item() if length else 0.0)
    return differences


worst = {}
for world_size in (2, 3, 4):
    by_length = zip(*miniddp.run_ranks(compare, world_size), strict=True)
    worst[world_size] = [max(ranks) for ranks in by_length]
    assert max(worst[world_size]) < 1e-5, "only rounding may differ"
table(
    [
        [f"{length:,}", *(f"{row[i]:.1e}".replace("0.0e+00", "0") for row in worst.values())]
        for i, length in enumerate(LENGTHS)
    ],
    ["elements", *(f"{world_size} ranks" for world_size in worst)],
)

# %% [markdown]
# ## Bytes, counted
#
# Every function of `miniddp.ring` returns the bytes that its rank sent.


# %% name="bytes"
NUM_ELEMENTS = 840_000  # divisible by 2, 3, 4 and 8


def count_bytes(rank: int) -> tuple[int, int]:
    tensor = torch.randn(NUM_ELEMENTS)
    return ring.all_reduce(tensor), ring.root_all_reduce(tensor)


num_bytes = 4 * NUM_ELEMENTS
rows = []
for world_size in (2, 3, 4, 8):
    sent = miniddp.run_ranks(count_bytes, world_size)
    expected = 2 * (world_size - 1) * num_bytes // world_size
    assert all(by_ring == expected for by_ring, _ in sent), "to the byte"
    assert sent[0][1] == (world_size - 1) * num_bytes
    assert all(by_root == num_bytes for _, by_root in sent[1:])
    rows.append(
        [
            world_size,
            f"{sent[0][0]:,}",
            *(f"{count / num_bytes:.4g}" for count in (sent[0][0], sent[0][1], sent[1][1])),
        ]
    )
    record(
        **{
            f"ring_sent_{world_size}": sent[0][0] / num_bytes,
            f"root_sent_{world_size}": sent[0][1] / num_bytes,
        }
    )
table(
    rows,
    [
        "ranks",
        "ring, bytes",
        "ring, in S",
        "root-based: rank 0, in S",
        "others, in S",
    ],
)
record(tensor_bytes=num_bytes, tensor_elements=NUM_ELEMENTS)

# %% [markdown]
# ## Bandwidth
#
# Tensors of 32-bit floats. Every round runs each algorithm once; the slowest rank counts; the
# median of the rounds is shown.

# %% name="measure"
MB = 10**6
SIZES = [MB // 1000, MB // 100, MB // 10, MB, 4 * MB, 16 * MB, 64 * MB]
ROUNDS = 15
STYLES = {
    "ring": ("miniddp's ring", RANK_COLORS[0], "o", "-"),
    "library": (f"{BACKEND}'s all-reduce", RANK_COLORS[1], "s", "--"),
    "root": ("root-based", MUTED, "^", ":"),
}
timings: dict[int, list[Timing]] = {
    ranks: bench(ranks, SIZES, ROUNDS, tuple(STYLES), BACKEND) for ranks in TIMED
}


def of(ranks: int, algorithm: str, size: int) -> Timing:
    return next(t for t in timings[ranks] if t.algorithm == algorithm and t.bytes == size)


# %% name="bandwidth"
fig, panels = plt.subplots(2, 1, figsize=(5.2, 5.4), sharex=True)
for axes, ranks in zip(panels, timings, strict=True):
    for algorithm, (label, color, marker, dash) in STYLES.items():
        speeds = [of(ranks, algorithm, size).bus_bandwidth / 1e9 for size in SIZES]
        megabytes = [size / MB for size in SIZES]
        axes.plot(megabytes, speeds, marker=marker, linestyle=dash, color=color, label=label)
    axes.set(title=f"{ranks} ranks", ylabel="bus bandwidth, GB/s", xscale="log", ylim=(0, None))
panels[0].legend()
panels[1].set(xlabel="size of the tensor, MB")
figure(fig)


# %% name="bandwidth-table"
table(
    [
        [
            ranks,
            f"{size / MB:g}",
            *(f"{of(ranks, name, size).seconds * 1e3:.2f}" for name in STYLES),
            f"{ratio(of(ranks, 'ring', size), of(ranks, 'library', size)):.2f}",
        ]
        for ranks in timings
        for size in SIZES
    ],
    ["ranks", "MB", "ring, ms", f"{BACKEND}, ms", "root-based, ms", f"ring / {BACKEND}"],
)

# %% name="values"
largest = SIZES[-1]
for ranks in timings:
    ours, library, root = (of(ranks, name, largest) for name in STYLES)
    record(
        **{
            f"milliseconds_ring_{ranks}": ours.seconds * 1e3,
            f"algbw_ring_{ranks}": ours.algorithm_bandwidth / 1e9,
            f"busbw_ring_{ranks}": ours.bus_bandwidth / 1e9,
            f"busbw_library_{ranks}": library.bus_bandwidth / 1e9,
            f"ratio_{ranks}": ratio(ours, library),
            f"root_over_ring_{ranks}": ratio(root, ours),
            f"root_over_ring_small_{ranks}": ratio(
                of(ranks, "root", SIZES[0]), of(ranks, "ring", SIZES[0])
            ),
        }
    )
record(largest_mb=largest // MB, smallest_kb=SIZES[0] // 1000, rounds=ROUNDS)

# %% [markdown]
# ## α and β
#
# The model of the ring: 2(N − 1) messages of S / N bytes, each taking α + β S / N seconds.

# %% name="fit"
fits = {
    (ranks, name): fit([of(ranks, name, size) for size in SIZES])
    for ranks in timings
    for name in ("ring", "library")
}
assert all(alpha > 0 and beta > 0 for alpha, beta in fits.values())
table(
    [
        [ranks, STYLES[name][0], f"{alpha * 1e6:.0f}", f"{1e-9 / beta:.2f}"]
        for (ranks, name), (alpha, beta) in fits.items()
    ],
    ["ranks", "algorithm", "α, µs per message", "1 / β, GB/s"],
)
for ranks in timings:
    alpha, beta = fits[ranks, "ring"]
    record(
        **{
            f"alpha_us_{ranks}": alpha * 1e6,
            f"beta_ns_{ranks}": beta * 1e9,
            f"even_kb_{ranks}": ranks * alpha / beta / 1e3,
        }
    )

# %% name="model"
fig, axes = plt.subplots()
for ranks, marker, dash in zip(timings, "os", ("-", "--"), strict=True):
    alpha, beta = fits[ranks, "ring"]
    milliseconds = [of(ranks, "ring", size).seconds * 1e3 for size in SIZES]
    curve = [SIZES[0] * 10 ** (i / 20) for i in range(97)]
    model = [2 * (ranks - 1) * (alpha + beta * size / ranks) * 1e3 for size in curve]
    color = RANK_COLORS[0]
    axes.plot([size / MB for size in SIZES], milliseconds, marker, color=color, fillstyle="none")
    axes.plot([size / MB for size in curve], model, dash, color=color, label=f"{ranks} ranks")
axes.set(xscale="log", yscale="log", xlabel="size of the tensor, MB", ylabel="time, ms")
axes.legend()
figure(fig)

# %% [markdown]
# ## Segments
#
# The reduce-scatter of the largest tensor, with segments of several lengths.


# %% name="segments"
KIB = 2**10
SEGMENTS = {"256 KiB": 256 * KIB, "1 MiB": KIB**2, "4 MiB": 4 * KIB**2, "no segments": largest}


def time_segments(rank: int) -> dict[str, float]:
    original = torch.rand(largest // 4)
    place = ring.Ring()
    seconds: dict[str, list[float]] = {name: [] for name in SEGMENTS}
    for number in range(1 + ROUNDS):
        for name, ring.SEGMENT_BYTES in SEGMENTS.items():
            chunks = original.clone().tensor_split(place.size)
            dist.barrier()
            start = time.perf_counter()
            ring.reduce_scatter_phase(chunks, place)
            took = slowest(time.perf_counter() - start, original.device)
            if number > 0:  # the first round warms up
                seconds[name].append(took)
    return {name: median(rounds) for name, rounds in seconds.items()}


by_ranks = {ranks: miniddp.run_ranks(time_segments, ranks)[0] for ranks in TIMED}
table(
    [[name, *(f"{seconds[name] * 1e3:.1f}" for seconds in by_ranks.values())] for name in SEGMENTS],
    ["length of a segment", *(f"{ranks} ranks, ms" for ranks in by_ranks)],
)
