# %% [markdown]
# # Replicas
#
# Data parallel training keeps one copy of the model per rank. This run builds the copies with
# equal and with different seeds, lets `SimpleDDP` compare them, and repairs the ones that differ.

# %% name="setup"
import torch

import miniddp
from book import provenance, record, show_ranks, table
from miniddp.model import load_model
from miniddp.process import device
from miniddp.replicate import broadcast_module, verify_replicas

WORLD_SIZES = [2, 4]
provenance(device=device(), world_size=WORLD_SIZES, backend="gloo")

# %% [markdown]
# ## The same seed on every rank
#
# Every rank builds the model by itself. Nothing is sent. The seed alone makes the weights equal.


# %% name="same-seed"
def build(seed: int) -> torch.nn.Module:
    miniddp.set_seed(seed)
    return load_model("tiny", pretrained=False).to(device())


def first_weights(model: torch.nn.Module) -> str:
    weights = next(model.parameters()).flatten()[:4].tolist()
    return " ".join(f"{weight:+.6f}" for weight in weights)


def wrap_with_one_seed(rank: int) -> int:
    model = build(seed=42)
    print("first weights:", first_weights(model))
    ddp = miniddp.SimpleDDP(model)
    print("SimpleDDP: the replicas are identical")
    return sum(parameter.numel() for parameter in ddp.parameters())


counts = miniddp.run_ranks(wrap_with_one_seed, 4)
assert len(set(counts)) == 1
assert len(set(counts.outputs)) == 1, "every rank must print the same weights"
show_ranks(counts)
record(parameters=counts[0])

# %% [markdown]
# ## One rank with another seed
#
# Rank 0 seeds with 43, the others with 42. The weights differ, and `SimpleDDP` says so on every
# rank: also on rank 0, which would otherwise go on and wait for the others.


# %% name="different-seed"
def wrap_with_two_seeds(rank: int) -> str:
    model = build(seed=43 if rank == 0 else 42)
    print("first weights:", first_weights(model))
    try:
        miniddp.SimpleDDP(model)
    except ValueError as error:
        print(f"ValueError: {error}")
        return str(error)
    return ""


messages = miniddp.run_ranks(wrap_with_two_seeds, 2)
assert len(set(messages)) == 1, "every rank must see the same error"
assert "replicas differ" in messages[0]
show_ranks(messages)

# %% name="which-rank"
four = miniddp.run_ranks(lambda rank: wrap_with_two_seeds(0 if rank == 2 else 1), 4)
assert all("rank 2 " in message for message in four)
print(four[0])

# %% [markdown]
# ## Repair by broadcast
#
# A broadcast copies the tensors of rank 0 to all other ranks. Afterwards the comparison passes.


# %% name="broadcast"
def repair(rank: int) -> tuple[float, float]:
    model, reference = build(seed=42 + rank), build(seed=42)
    before = difference(model, reference)
    broadcast_module(model)
    verify_replicas(model)
    after = difference(model, reference)
    print(f"largest difference from rank 0: {before:.6f} before, {after:.6f} after the broadcast")
    return before, after


def difference(a: torch.nn.Module, b: torch.nn.Module) -> float:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max((x - y).abs().max().item() for x, y in pairs)


repaired = miniddp.run_ranks(repair, 4)
assert repaired[0][0] == 0
assert all(before > 0 for before, _ in repaired[1:])
assert all(after == 0 for _, after in repaired)
show_ranks(repaired)
record(largest_difference=max(before for before, _ in repaired))

# %% [markdown]
# ## Buffers are part of the replica
#
# Batch normalisation keeps a running mean in a *buffer*: a tensor that is saved with the model but
# that the optimizer does not train. Every rank sees other data, so after one forward pass the
# buffers differ, although every parameter is still the same.


# %% name="buffers"
def drift(rank: int) -> tuple[float, str]:
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4)).to(device())
    broadcast_module(model)
    torch.manual_seed(rank)
    model(torch.randn(16, 8).to(device()))
    mean = model[1].running_mean
    print("running mean:", " ".join(f"{value:+.4f}" for value in mean.tolist()))
    try:
        verify_replicas(model)
        message = ""
    except ValueError as error:
        message = str(error)
        print(f"ValueError: {error}")
    broadcast_module(model)
    verify_replicas(model)
    print("after a broadcast: identical")
    return mean[0].item(), message


buffers = miniddp.run_ranks(drift, 2)
assert all("buffer '1.running_mean'" in message for _, message in buffers)
show_ranks(buffers)

# %% [markdown]
# ## What the comparison costs
#
# `verify_replicas` sends a digest of every tensor, not the tensors. Its cost is set by reading the
# weights once, so it grows with the model, but the bytes on the wire do not.


# %% name="cost"
def cost(rank: int, size: str) -> tuple[int, int, float]:
    import time

    model = load_model(size, pretrained=False).to(device())
    broadcast_module(model)
    start = time.perf_counter()
    verify_replicas(model)
    seconds = time.perf_counter() - start
    parameters = list(model.parameters())
    return len(parameters), sum(p.numel() * p.element_size() for p in parameters), seconds


rows = []
for size in ("tiny", "5m", "25m"):
    tensors, num_bytes, seconds = miniddp.run_ranks(cost, 2, size, timeout=120)[0]
    rows.append([size, tensors, f"{num_bytes / 1e6:.1f}", f"{seconds * 1e3:.0f}"])
table(rows, ["model", "tensors", "MB of weights", "ms to compare, 2 ranks"])
