# %% [markdown]
# # All-reduce, the ring
#
# The ring all-reduce of `miniddp`, step by step on small numbers, compared with Gloo's on random
# data, its bytes counted, and its bandwidth measured beside Gloo's and beside the root-based way.

# %% name="setup"
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist

import miniddp
from book import MUTED, RANK_COLORS, figure, provenance, record, show_ranks, table
from miniddp import ring
from miniddp.bench_ring import Timing, bench, fit, ratio
from miniddp.process import device

provenance(device=device(), world_size=[2, 3, 4, 8], backend="gloo")

# %% [markdown]
# ## Three ranks, three chunks
#
# Rank 0 holds 1, 2, 3, rank 1 holds 10, 20, 30, rank 2 holds 100, 200, 300. The digits of a sum
# tell which ranks have contributed.


# %% name="walk"
def walk(rank: int) -> list[float]:
    tensor = torch.tensor([1.0, 2.0, 3.0]) * 10**rank
    expected = tensor.clone()
    dist.all_reduce(expected)
    place = ring.find_ring(None)
    assert place is not None
    chunks = tensor.tensor_split(3)
    print("at first:           ", show(tensor))
    for step, (send, receive) in enumerate(ring.reduce_scatter_steps(rank, 3), start=1):
        arrived = torch.empty(1)
        place.wait(place.exchange(chunks[send], arrived))
        chunks[receive].add_(arrived)
        print(f"reduce-scatter {step}:   {show(tensor)}   sent chunk {send}, added to {receive}")
    for step, (send, receive) in enumerate(ring.all_gather_steps(rank, 3), start=1):
        place.wait(place.exchange(chunks[send], chunks[receive]))
        print(f"all-gather {step}:       {show(tensor)}   sent chunk {send}, replaced {receive}")
    assert torch.equal(tensor, expected)
    return tensor.tolist()


def show(tensor: torch.Tensor) -> str:
    return " ".join(f"{value:3.0f}" for value in tensor.tolist())


walked = miniddp.run_ranks(walk, 3)
assert walked == [[111, 222, 333]] * 3
show_ranks(walked)

# %% [markdown]
# ## The same sum as Gloo's
#
# Random data, because equal values cannot show a chunk that went to the wrong place. Lengths from
# zero to a prime number larger than the number of ranks.


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
        differences.append((ours - theirs).abs().max().item() if length else 0.0)
    return differences


rows = []
for world_size in (2, 3, 4):
    differences = miniddp.run_ranks(compare, world_size)
    worst = [max(rank[i] for rank in differences) for i in range(len(LENGTHS))]
    assert max(worst) < 1e-5, "only rounding may differ: the ring adds in another order"
    rows += [
        [world_size, f"{length:,}", f"{d:.1e}"] for length, d in zip(LENGTHS, worst, strict=True)
    ]
table(
    [row for row in rows if row[1] in ("0", "1", "5", "1,000", "65,537")],
    ["ranks", "elements", "largest difference from gloo"],
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
    rows.append([world_size, f"{sent[0][0]:,}", sent[0][0] / num_bytes, sent[0][1] / num_bytes])
table(
    rows,
    [
        "ranks",
        "bytes sent by each rank of the ring",
        "in sizes of the tensor",
        "root-based, sent by rank 0, in sizes of the tensor",
    ],
)
record(
    tensor_bytes=num_bytes, ring_sent_2=rows[0][2], ring_sent_4=rows[2][2], root_sent_4=rows[2][3]
)
record(ring_sent_8=rows[3][2], root_sent_8=rows[3][3])

# %% [markdown]
# ## Bandwidth
#
# Tensors of 32-bit floats in host memory. Every round runs each algorithm once; the slowest rank
# counts; the median of the rounds is shown.

# %% name="measure"
MB = 10**6
SIZES = [MB // 10, MB // 2, 2 * MB, 8 * MB, 32 * MB, 64 * MB]
timings: dict[int, list[Timing]] = {
    ranks: bench(ranks, SIZES, rounds=7, algorithms=("ring", "library", "root")) for ranks in (2, 4)
}

# %% name="bandwidth"
STYLES = {
    "ring": ("miniddp's ring", RANK_COLORS[0], "o"),
    "library": ("gloo's all-reduce", RANK_COLORS[1], "s"),
    "root": ("root-based", MUTED, "^"),
}
fig, panels = plt.subplots(2, 1, figsize=(5.2, 5.4), sharex=True, sharey=True)
for axes, (ranks, rows) in zip(panels, timings.items(), strict=True):
    for algorithm, (label, color, marker) in STYLES.items():
        own = [timing for timing in rows if timing.algorithm == algorithm]
        sizes = [timing.bytes / MB for timing in own]
        speeds = [timing.bus_bandwidth / 1e9 for timing in own]
        axes.plot(sizes, speeds, marker=marker, color=color, label=label)
    axes.set(title=f"{ranks} ranks", ylabel="bus bandwidth, GB/s", xscale="log", ylim=(0, None))
panels[0].legend()
panels[1].set(xlabel="size of the tensor, MB")
figure(fig)


# %% name="bandwidth-table"
def of(ranks: int, algorithm: str, size: int) -> Timing:
    return next(t for t in timings[ranks] if t.algorithm == algorithm and t.bytes == size)


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
    ["ranks", "MB", "ring, ms", "gloo, ms", "root-based, ms", "ring / gloo"],
)

# %% [markdown]
# ## α and β
#
# The model of the ring: 2(N − 1) messages of S / N bytes, each taking α + β S / N seconds.

# %% name="fit"
rows = []
for ranks in timings:
    for name in ("ring", "library"):
        own = [timing for timing in timings[ranks] if timing.algorithm == name]
        alpha, beta = fit(own)
        assert beta > 0
        rows.append([ranks, STYLES[name][0], f"{alpha * 1e6:.0f}", f"{1e-9 / beta:.2f}"])
table(rows, ["ranks", "algorithm", "α, µs per message", "1 / β, GB/s"])

# %% name="values"
largest = SIZES[-1]
for ranks in timings:
    ours, library, root = (of(ranks, name, largest) for name in STYLES)
    record(
        **{
            f"busbw_ring_{ranks}": ours.bus_bandwidth / 1e9,
            f"busbw_gloo_{ranks}": library.bus_bandwidth / 1e9,
            f"ratio_{ranks}": ratio(ours, library),
            f"root_over_ring_{ranks}": ratio(root, ours),
            f"milliseconds_ring_{ranks}": ours.seconds * 1e3,
        }
    )
record(largest_mb=largest // MB, smallest_mb=SIZES[0] / MB)
