# %% [markdown]
# # All-reduce, the ring
#
# What stage 4 sends, and what stage 5 sends. Between the two: a mistake in the ring all-reduce of
# `miniddp` under test, its order of additions, its results beside Gloo's on random data, its bytes
# counted, and the time that the model of latency and bandwidth gives for it.

# %% name="setup"
import re
import runpy

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist

import miniddp
from book import figure, provenance, record, show_ranks, table
from instruments.all_reduce_checks import DATA, largest_difference, passes
from instruments.cost import (
    Link,
    ring_all_reduce_seconds,
    root_all_reduce_seconds,
    tree_all_reduce_seconds,
)
from instruments.failures import functions_of, hang_of
from instruments.programs import run_torchrun
from miniddp import ring
from miniddp.process import device
from shakespeare import build_language_model

provenance(device=device(), world_size=[2, 3, 4, 8], backend="gloo")

# %% [markdown]
# ## What stage 4 asks for in a step


# %% name="stage-4" ranks="2"
def asked_for(rank: int) -> list[int]:
    """The bytes of each tensor that stage 4 passes to `dist.all_reduce` in a step."""
    model = build_language_model()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    sizes = []
    dist.all_reduce = lambda tensor: sizes.append(tensor.nbytes)
    runpy.run_path("stages/4_replicas.py")["average_gradients"](model)
    return sizes


sizes = miniddp.run_ranks(asked_for, 2)[0]
record(all_reduces=len(sizes), gradient_mb=sum(sizes) / 1e6)

# %% [markdown]
# ## What all-reduce promises
#
# Rank 0 holds 1, 2, 3, rank 1 holds 10, 20, 30, rank 2 holds 100, 200, 300. The digits of a sum
# tell which ranks have contributed.


# %% name="promise" ranks="3"
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

# %% [markdown]
# ## Everyone sends first
#
# A blocking send waits for the receiver. Three ranks that all send before they receive wait for
# each other.


# %% name="everyone-sends" ranks="3"
def everyone_sends_first(rank: int) -> None:
    arrived = torch.empty(3)
    dist.send(digits(rank), (rank + 1) % 3)
    dist.recv(arrived, (rank - 1) % 3)


PATIENCE = 4
hang = hang_of(everyone_sends_first, 3, timeout=PATIENCE)
for rank in range(3):
    functions = functions_of(hang.stacks[rank])
    assert {"send", "everyone_sends_first"} <= set(functions)
    assert "recv" not in functions
waits = f"after {PATIENCE} s still in send,\n  called by everyone_sends_first"
show_ranks([waits] * 3)

# %% [markdown]
# ## A ring that is wrong
#
# The signs in the all-gather are turned round: what comes from the left is stored as if it came
# from the right. Which data show the mistake?


# %% name="wrong" ranks="2 3 4"
def wrong_all_gather_steps(rank: int, size: int) -> list[tuple[int, int]]:
    steps = range(size - 1)
    return [((rank + step) % size, (rank + step + 1) % size) for step in steps]


rows = []
for world_size in (2, 3, 4):
    assert all(map(all, miniddp.run_ranks(passes, world_size)))
    wrong = miniddp.run_ranks(passes, world_size, wrong_all_gather_steps)
    seen = [all(verdicts) for verdicts in zip(*wrong, strict=True)]
    assert seen == [True, True, world_size == 2]
    rows.append([world_size, *("passes" if verdict else "fails" for verdict in seen)])
table(rows, ["ranks", *DATA])

# %% [markdown]
# ## The order of additions
#
# Rank 0 holds 100 million three times, rank 1 minus 100 million, rank 2 holds 1. The exact sum is
# 1. Each chunk of the ring adds in another order.


# %% name="rounding" ranks="3"
def rounding(rank: int) -> list[list[float]]:
    ours = torch.full((3,), [1e8, -1e8, 1.0][rank])
    theirs = ours.clone()
    print("has ", in_columns(ours))
    ring.all_reduce(ours)
    dist.all_reduce(theirs)
    print("ring", in_columns(ours))
    print("gloo", in_columns(theirs))
    return [ours.tolist(), theirs.tolist()]


def in_columns(tensor: torch.Tensor) -> str:
    return " ".join(f"{value:6g}" for value in tensor.tolist())


rounded = miniddp.run_ranks(rounding, 3)
assert rounded == [rounded[0]] * 3, "the same on all ranks"
assert rounded[0][0] == [0, 0, 1]
show_ranks(rounded)

# %% [markdown]
# ## The same sum as Gloo's
#
# Random data, and lengths from zero to a prime number larger than the number of ranks.

# %% name="correct" ranks="2 3 4"
LENGTHS = [0, 1, 2, 3, 4, 5, 1000, 65537]
largest = max(
    max(miniddp.run_ranks(largest_difference, world_size, LENGTHS)) for world_size in (2, 3, 4)
)
assert largest < 1e-5, "only rounding may differ"
record(largest_difference=largest)

# %% [markdown]
# ## Bytes, counted
#
# Every function of `miniddp.ring` returns the bytes that its rank sent.


# %% name="bytes" ranks="2 3 4 8"
NUM_ELEMENTS = 840_000  # divisible by 2, 3, 4 and 8


def count_bytes(rank: int) -> tuple[int, int]:
    tensor = torch.randn(NUM_ELEMENTS)
    return ring.all_reduce(tensor), ring.root_all_reduce(tensor)


num_bytes = 4 * NUM_ELEMENTS
rows = []
for world_size in (2, 3, 4, 8):
    by_ring, by_root = zip(*miniddp.run_ranks(count_bytes, world_size), strict=True)
    assert set(by_ring) == {2 * (world_size - 1) * num_bytes // world_size}, "to the byte"
    assert by_root[0] == (world_size - 1) * num_bytes
    assert set(by_root[1:]) == {num_bytes}
    in_sizes = [count / num_bytes for count in (by_ring[0], by_root[0], by_root[1])]
    rows.append([world_size, f"{by_ring[0]:,}", *(f"{size:.4g}" for size in in_sizes)])
record(ring_sent_8=by_ring[0] / num_bytes, root_sent_8=by_root[0] / num_bytes)
columns = ["ranks", "ring, bytes", "ring, in S", "root-based: rank 0, in S", "others, in S"]
table(rows, columns)

# %% [markdown]
# ## How long it takes, by the model
#
# A message of b bytes takes α + β b. Computed, not measured.

# %% name="model" badge="computed"
LINK = Link(alpha=20e-6, beta=1e-10)  # 10 GB/s
WAYS = {
    "root": root_all_reduce_seconds,
    "ring": ring_all_reduce_seconds,
    "tree": tree_all_reduce_seconds,
}
RANKS = [2**power for power in range(1, 11)]
STYLES = {
    "root": {"linewidth": 6, "alpha": 0.35},  # for 4 kB the ring lies on it
    "ring": {"linewidth": 2},
    "tree": {"linewidth": 2, "linestyle": "--"},
}

fig, panels = plt.subplots(1, 2, figsize=(6.4, 3), layout="constrained")
for axes, (size, num_bytes) in zip(panels, (("4 kB", 4e3), ("100 MB", 1e8)), strict=True):
    for name, seconds in WAYS.items():
        times = [1e3 * seconds(num_bytes, ranks, LINK) for ranks in RANKS]
        axes.plot(RANKS, times, label=name, **STYLES[name])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([2, 8, 64, 1024], labels=["2", "8", "64", "1,024"])
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.set(xlabel="ranks", title=size)
panels[0].set_ylabel("milliseconds")
panels[0].legend()
figure(fig)

# %% name="model-values" badge="computed"
record(
    alpha_us=1e6 * LINK.alpha,
    bandwidth=1e-9 / LINK.beta,
    stage_4_ms=1e3 * sum(ring_all_reduce_seconds(size, 4, LINK) for size in sizes),
    stage_5_ms=1e3 * ring_all_reduce_seconds(sum(sizes), 4, LINK),
)

# %% [markdown]
# ## The program of this chapter

# %% name="stage" ranks="2 3 4"
rows = []
for ranks in (2, 3, 4):
    (sent,) = re.findall("each step sent .*", run_torchrun(ranks, "stages/5_ring.py", STEPS="2"))
    assert f" {2 * (ranks - 1) / ranks * sum(sizes) / 1e6:.2f} MB" in sent
    rows.append([ranks, sent])
table(rows, ["ranks", "printed below the losses"])
