# %% [markdown]
# # Memory and sharding
#
# A training step keeps parameters, gradients and the optimizer's state. This run counts their bytes
# on every rank, under DDP and under what shards them, and compares the sums with
# `instruments.memory`. It also counts what each way sends, what it has at its peak, and whether it
# trains the same model.

# %% name="setup"
import gc
import os
import re
import resource
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Adam, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import miniddp
from book import FOREGROUND, MUTED, data_dir, figure, provenance, record, show_ranks, table
from finetune.data import collate, encode, load_mrpc
from finetune.model import load_model, load_tokenizer
from instruments import memory
from instruments.memory import Memory
from miniddp.process import device
from miniddp.zero import FullyShardedModule, ShardedOptimizer

WORLD_SIZES = [1, 2, 4]
on_gpu = device().type == "cuda"
SIZES = ("25m", "135m", "360m") if on_gpu else ("tiny", "5m", "25m")
SIZE = SIZES[1]
SEQUENCES = 4
MB = 1e6
provenance(device=device(), world_size=WORLD_SIZES, backend="gloo")
pairs = load_mrpc(data_dir())
rows = pairs[:]
tokenizer = load_tokenizer(rows["sentence1"] + rows["sentence2"], "tiny", pretrained=False)
encoded = encode(pairs.select(range(min(512, len(pairs)))), tokenizer, max_length=64)


def batch_of(start: int, sequences: int, where: torch.device) -> dict[str, Tensor]:
    chosen = [encoded[(start + i) % len(encoded)] for i in range(sequences)]
    padded = collate([*chosen, encoded[LONGEST]], tokenizer)
    return {name: tensor[:-1].to(where) for name, tensor in padded.items()}


LONGEST = max(range(len(encoded)), key=lambda i: len(encoded[i]["input_ids"]))


def build(size: str, where: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
    miniddp.set_seed(0)
    return load_model(size, pretrained=False).to(where, dtype)


print(f"{SEQUENCES} sequences of {len(encoded[LONGEST]['input_ids'])} tokens at most on each rank")

# %% [markdown]
# ## Five ways to train the same model


# %% name="methods"
Trained = tuple[nn.Module, Optimizer]


def ddp(model: nn.Module) -> Trained:
    wrapped = miniddp.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return wrapped, Adam(wrapped.parameters(), lr=1e-3)


def zero1(model: nn.Module) -> Trained:
    wrapped = miniddp.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return wrapped, ShardedOptimizer(wrapped.parameters(), Adam, lr=1e-3)


def torch_zero1(model: nn.Module) -> Trained:
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), Adam, lr=1e-3)


def zero3(model: nn.Module, **options: Any) -> Trained:
    layers = model.model.layers
    for i, layer in enumerate(layers):
        layers[i] = FullyShardedModule(layer, **options)
    wrapped = FullyShardedModule(model, **options)
    return wrapped, Adam(wrapped.parameters(), lr=1e-3)


def torch_zero3(model: nn.Module, **options: Any) -> Trained:
    kind = next(model.parameters()).device.type
    mesh = dist.device_mesh.init_device_mesh(kind, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, **options)
    fully_shard(model, mesh=mesh, reshard_after_forward=True, **options)
    return model, Adam(model.parameters(), lr=1e-3)


def torch_in_bf16(model: nn.Module) -> Trained:
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
    )
    return torch_zero3(model, mp_policy=policy)


def keep_gathered(model: nn.Module) -> Trained:
    return zero3(model, reshard_after_forward=False)


def one_unit(model: nn.Module) -> Trained:
    wrapped = FullyShardedModule(model)
    return wrapped, Adam(wrapped.parameters(), lr=1e-3)


METHODS: dict[str, tuple[Callable[[nn.Module], Trained], int]] = {
    "DDP": (ddp, 0),
    "ZeRO-1, ShardedOptimizer": (zero1, 1),
    "ZeRO-1, torch's": (torch_zero1, 1),
    "ZeRO-3, FullyShardedModule": (zero3, 3),
    "ZeRO-3, fully_shard": (torch_zero3, 3),
}


def place_of(method: Callable[[nn.Module], Trained]) -> torch.device:
    """The CPU for `fully_shard`: on a GPU it needs NCCL, and ranks that share a GPU cannot."""
    return torch.device("cpu") if method in (torch_zero3, torch_in_bf16) else device()


def own_batch(rank: int, number: int, where: torch.device) -> dict[str, Tensor]:
    start = (number * dist.get_world_size() + rank) * SEQUENCES
    return batch_of(start, SEQUENCES, where)


def step(trained: Trained, batch: dict[str, Tensor]) -> None:
    module, optimizer = trained
    optimizer.zero_grad()
    module(**batch).loss.backward()
    optimizer.step()


# %% [markdown]
# ## A model that is too large
#
# Each rank may take `BUDGET` bytes more than it has when it starts: the operating system refuses
# the rest, as a GPU would. Linux only, and in the CPU's memory.


# %% name="too-large"
BUDGET, LARGE = 350e6, "25m"


def bytes_taken() -> int:
    with open("/proc/self/status") as status:
        return next(1000 * int(line.split()[1]) for line in status if line.startswith("VmData"))


def train_within(rank: int, method: Callable[[nn.Module], Trained]) -> str:
    """How far this rank gets."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (bytes_taken() + int(BUDGET), hard))
    at = "the model"
    try:
        module, optimizer = method(build(LARGE, torch.device("cpu")))
        for number in (1, 2):
            optimizer.zero_grad()
            at = f"step {number}, forward"
            loss = module(**batch_of(rank, 1, torch.device("cpu"))).loss
            at = f"step {number}, backward"
            loss.backward()
            at = f"step {number}, optimizer.step()"
            optimizer.step()
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        return f"{at}: can't allocate memory"
    return "two steps done"


got = {
    name: miniddp.run_ranks(train_within, 4, method, timeout=300)
    for name, method in (("DDP", ddp), ("in shards", zero3))
}
assert set(got["DDP"]) == {"step 1, optimizer.step(): can't allocate memory"}
assert set(got["in shards"]) == {"two steps done"}
for name, ranks in got.items():
    for rank, ending in enumerate(ranks):
        print(f"{name:9} | rank {rank} | {ending}")
large = sum(p.numel() for p in build(LARGE, torch.device("cpu")).parameters())
record(budget_mb=BUDGET / MB, large_parameters_mb=4 * large / MB, large_states_mb=16 * large / MB)

# %% [markdown]
# ## What a rank holds between two steps


# %% name="held"
def nbytes(tensors: Iterable[Tensor]) -> int:
    """The bytes behind these tensors on this rank, those of a shared storage once."""
    local = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}
    return sum(storages.values())


def states_of(optimizer: Optimizer) -> list[Tensor]:
    """The state that grows with the parameters: not the step counters."""
    states = getattr(optimizer, "optim", optimizer).state.values()
    return [value for state in states for name, value in state.items() if name != "step"]


def held(trained: Trained) -> Memory:
    module, optimizer = trained
    parameters = list(module.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return Memory(nbytes(parameters), nbytes(gradients), nbytes(states_of(optimizer)))


def hold(rank: int, method: Callable[[nn.Module], Trained], size: str) -> tuple[Memory, int]:
    """What this rank holds after a step, and what the GPU's allocator says, if there is one."""
    where = place_of(method)
    trained = method(build(size, where))
    step(trained, own_batch(rank, 0, where))
    gc.collect()
    return held(trained), torch.cuda.memory_allocated() if where.type == "cuda" else 0


def hold_each(
    rank: int, cases: list[tuple[Callable[[nn.Module], Trained], str]]
) -> list[tuple[Memory, int]]:
    warnings.simplefilter("ignore")
    found = []
    for method, size in cases:
        found.append(hold(rank, method, size))
        gc.collect()
    return found


def on_the_fullest(world_size: int, cases: list[Any]) -> list[tuple[Memory, int]]:
    """For each case the rank that holds most."""
    results = miniddp.run_ranks(hold_each, world_size, cases, timeout=300)
    return [max(ranks, key=lambda found: found[0].total) for ranks in zip(*results, strict=True)]


counts = {
    size: sum(p.numel() for p in build(size, torch.device("cpu")).parameters()) for size in SIZES
}
# %% [markdown]
# ## The same for 1, 2 and 4 ranks, sharded


# %% name="sharded"
each = memory.bytes_per_parameter("adam")
measured: dict[tuple[str, int], Memory] = {}
for world_size in WORLD_SIZES:
    cases = [(method, SIZE) for method, _ in METHODS.values()]
    for name, (found, _) in zip(METHODS, on_the_fullest(world_size, cases), strict=True):
        measured[name, world_size] = found
lines = []
for name, (_, stage) in METHODS.items():
    line = [name]
    for world_size in WORLD_SIZES:
        found = measured[name, world_size]
        predicted = memory.memory_per_rank(counts[SIZE], world_size, stage, each)
        assert 0.98 * predicted.total < found.total < 1.1 * predicted.total, (name, found)
        line.append(f"{found.total / MB:.1f}")
    line.append(f"{predicted.total / MB:.1f}")
    lines.append(line)
table(lines, ["MB on the fullest rank", "1 rank", "2 ranks", "4 ranks", "4, predicted"])

# %% name="kinds"
lines = []
for name in ("DDP", "ZeRO-1, ShardedOptimizer", "ZeRO-3, FullyShardedModule"):
    found = measured[name, 4]
    parts = (found.parameters, found.gradients, found.optimizer, found.total)
    lines.append([name, *(f"{part / counts[SIZE]:.2f}" for part in parts)])
table(lines, ["bytes per parameter, 4 ranks", "parameters", "gradients", "Adam", "sum"])

# %% name="savings-figure"
sizes = [2**i for i in range(7)]
fig, axes = plt.subplots()
for stage, dashes in enumerate(("-", "--", "-.", ":")):
    sums = [memory.memory_per_rank(counts[SIZE], n, stage, each).total for n in sizes]
    axes.plot(
        sizes,
        [total / counts[SIZE] for total in sums],
        dashes,
        color=FOREGROUND if stage else MUTED,
    )
    axes.annotate(
        f"ZeRO-{stage}" if stage else "DDP",
        (sizes[-1], sums[-1] / counts[SIZE]),
        xytext=(8, 0),
        textcoords="offset points",
        va="center",
    )
for (name, world_size), found in measured.items():
    if "torch" not in name and "fully_shard" not in name:
        axes.plot(world_size, found.total / counts[SIZE], "o", color=FOREGROUND)
axes.set(xlabel="ranks", ylabel="bytes per parameter", ylim=(0, 17))
axes.set_xscale("log", base=2)
axes.set_xticks(sizes, [str(n) for n in sizes])
figure(fig)

# %% [markdown]
# ## What a step sends
#
# A mode of PyTorch's dispatcher sees every collective with its tensors. Counted is what a rank
# receives, which over all ranks is what they send. An all-reduce counts as that of a ring.


# %% name="traffic"
class Traffic(TorchDispatchMode):
    """Adds up the bytes that collectives bring to this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.received = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            self.received += self.bytes_of(name, args)
        return func(*args, **(kwargs or {}))

    def bytes_of(self, name: str, args: Any) -> float:
        part = (dist.get_world_size() - 1) / dist.get_world_size()
        first = sum(t.nbytes for t in tree_leaves(args[0]) if isinstance(t, Tensor))
        if name == "allreduce_":
            return 2 * part * first
        if name == "_allgather_base_":
            return part * first
        if name == "_reduce_scatter_base_":
            return part * args[1].nbytes
        if name == "broadcast_":
            return 0 if args[2] == dist.get_rank() else first
        return first if name == "recv_" else 0


def receive(rank: int, methods: list[Callable[[nn.Module], Trained]]) -> list[float]:
    """The bytes that one step brings to this rank; the first two steps build buckets and state."""
    warnings.simplefilter("ignore")
    received = []
    for method in methods:
        where = place_of(method)
        trained = method(build(SIZES[0], where))
        for i in range(2):
            step(trained, own_batch(rank, i, where))
        with Traffic() as traffic:
            step(trained, own_batch(rank, 2, where))
        received.append(traffic.received)
    return received


EXPECTED = {
    "DDP": (ddp, "all-reduce", 2),
    "ShardedOptimizer": (zero1, "all-reduce, then parameters", 3),
    "torch's ZeRO-1": (torch_zero1, "all-reduce, then parameters", 3),
    "FullyShardedModule": (zero3, "two all-gathers, reduce-scatter", 3),
    "FullyShardedModule, keeps": (keep_gathered, "one all-gather, reduce-scatter", 2),
    "fully_shard": (torch_zero3, "two all-gathers, reduce-scatter", 3),
    "fully_shard, bfloat16": (torch_in_bf16, "the same, all-gathers half as large", 2),
}
methods = [method for method, _, _ in EXPECTED.values()]
received = {n: miniddp.run_ranks(receive, n, methods, timeout=300) for n in (2, 4)}
lines = []
for i, (name, (_, what, expected)) in enumerate(EXPECTED.items()):
    for world_size, ranks in received.items():
        mean = sum(of_rank[i] for of_rank in ranks) / world_size
        volume = mean / (4 * counts[SIZES[0]] * (world_size - 1) / world_size)
        assert abs(volume - expected) < 0.1, (name, world_size, volume)
    lines.append([name, what, f"{volume:.2f}"])
table(lines, ["", "what travels in a step", "times Ψ"], align="llr")

# %% [markdown]
# ## The same model?
#
# Three steps of Adam in float64, against one process on the joined batch.


# %% name="parity"
TOLERANCE = 1e-9


def compare(rank: int, method: Callable[[nn.Module], Trained]) -> float:
    """The largest difference of a weight from those of one process on the joined batch."""
    world_size = dist.get_world_size()
    where = place_of(method)
    trained = method(build(SIZES[0], where, torch.float64))
    single = build(SIZES[0], where, torch.float64)
    alone = single, Adam(single.parameters(), lr=1e-3)
    for i in range(3):
        joined = batch_of(i * world_size * SEQUENCES, world_size * SEQUENCES, where)
        step(trained, {name: t.chunk(world_size)[rank] for name, t in joined.items()})
        step(alone, joined)
    weights = whole_weights(trained[0])
    return max(
        (weights[name] - value.detach().cpu()).abs().max().item()
        for name, value in single.named_parameters()
    )


def compare_each(rank: int, methods: list[Callable[[nn.Module], Trained]]) -> list[float]:
    warnings.simplefilter("ignore")
    return [compare(rank, method) for method in methods]


def whole_weights(module: nn.Module) -> dict[str, Tensor]:
    if isinstance(module, FullyShardedModule):
        return module.full_state_dict()
    state = getattr(module, "module", module).state_dict()
    full = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in state.items()}
    return {name: tensor.cpu() for name, tensor in full.items()}


results = miniddp.run_ranks(compare_each, 2, [m for m, _ in METHODS.values()], timeout=300)
lines = []
for name, differences in zip(METHODS, zip(*results, strict=True), strict=True):
    difference = max(differences)
    assert difference < TOLERANCE, (name, difference)
    lines.append([name, f"{difference:.0e}"])
table(lines, ["2 ranks, 3 steps, float64", "largest difference"], align="lr")
record(tolerance=TOLERANCE)

# %% [markdown]
# ## One forward and backward of a fully sharded model


# %% name="watch"
def watch(rank: int) -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3)]
    units = [FullyShardedModule(block.to(device())) for block in blocks]
    whole: dict[int, StorageWeakRef] = {}

    def say(what: str) -> None:
        here = [str(i) for i, storage in sorted(whole.items()) if not storage.expired()]
        print(f"{what:24}| whole: {' '.join(here) or '-'}")

    def report(unit: FullyShardedModule, number: int) -> None:
        gather, reduce_scatter = unit.gather, unit.reduce_scatter

        def watched_gather() -> Tensor:
            vector = gather()
            whole[number] = StorageWeakRef(vector.untyped_storage())
            say(f"block {number} gathers")
            return vector

        def watched_reduce_scatter(gradient: Tensor) -> Tensor:
            part = reduce_scatter(gradient)
            say(f"block {number} reduce-scatters")
            return part

        unit.gather, unit.reduce_scatter = watched_gather, watched_reduce_scatter
        unit.module.register_forward_hook(lambda *_: say(f"block {number} has computed"))

    for number, unit in enumerate(units):
        report(unit, number)
    say("the step begins")
    loss = nn.Sequential(*units)(torch.randn(4, 8, device=device())).square().mean()
    say("forward is over")
    loss.backward()
    say("backward is over")
    shard = units[0].shard
    assert all(storage.expired() for storage in whole.values())
    assert shard.grad.shape == shard.shape
    whole_size = sum(slot.shape.numel() for slot in units[0]._slots)
    print(f"shard of block 0: {len(shard)} of {whole_size}")


watched = miniddp.run_ranks(watch, 4)
assert watched.outputs[0].count("gathers") == 6
assert watched.outputs[0].count("reduce-scatters") == 3
print(watched.outputs[0], end="")

# %% [markdown]
# ## The peak of a step, and the activations
#
# Every tensor that a step makes is watched, from its birth to its end.


# %% name="peak"
class LiveBytes(TorchDispatchMode):
    """Bytes of tensors that are alive: those given at first, and all that are made inside."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.storages: dict[int, StorageWeakRef] = {}
        self.peak = 0
        for tensor in tensors:
            self.add(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        return result

    def add(self, tensor: Tensor) -> None:
        storage = StorageWeakRef(tensor.untyped_storage())
        if storage.cdata not in self.storages:
            self.storages[storage.cdata] = storage
            if tensor.nbytes > 2**16:  # looking at all of them takes time
                self.peak = max(self.peak, self.now())

    def now(self) -> int:
        self.storages = {k: ref for k, ref in self.storages.items() if not ref.expired()}
        alive = (
            torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self.storages.values()
        )
        return sum(storage.nbytes() for storage in alive if storage is not None)


@dataclass
class Case:
    method: Callable[[nn.Module], Trained]
    size: str
    sequences: int
    recompute: bool = False


def peak_of_step(rank: int, case: Case) -> tuple[int, int, int]:
    """Bytes before a step, kept from forward until backward, and at the step's peak."""
    model = build(case.size, device())
    if case.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    trained = module, optimizer = case.method(model)
    batch = batch_of(rank * case.sequences, case.sequences, device())
    for _ in range(2):  # buckets and state are there from the third step on
        step(trained, batch)
    optimizer.zero_grad()
    gc.collect()
    state = [*module.parameters(), *states_of(optimizer)]
    if isinstance(module, miniddp.DistributedDataParallel):
        state += [bucket.buffer() for bucket in module.reducer.buckets]
    if on_gpu:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss = module(**batch).loss
        kept = torch.cuda.memory_allocated() - before
        loss.backward()
        optimizer.step()
        return before, kept, torch.cuda.max_memory_allocated()
    with LiveBytes(state) as live:
        before = live.now()
        loss = module(**batch).loss
        kept = live.now() - before
        loss.backward()
        optimizer.step()
    return before, kept, live.peak


def peaks_of(rank: int, cases: list[Case]) -> list[tuple[int, int, int]]:
    warnings.simplefilter("ignore")
    found = []
    for case in cases:
        found.append(peak_of_step(rank, case))
        gc.collect()
    return found


WAYS = {
    "DDP": ddp,
    "ZeRO-1, ShardedOptimizer": zero1,
    "ZeRO-3, a unit per layer": zero3,
    "ZeRO-3, keeps what it gathers": keep_gathered,
    "ZeRO-3, all in one unit": one_unit,
}
results = miniddp.run_ranks(
    peaks_of, 4, [Case(method, SIZE, SEQUENCES) for method in WAYS.values()], timeout=300
)
peaks = {}
for name, ranks in zip(WAYS, zip(*results, strict=True), strict=True):
    peaks[name] = [max(values) / MB for values in zip(*ranks, strict=True)]
lines = [[name, *(f"{value:.1f}" for value in values)] for name, values in peaks.items()]
table(lines, ["MB, fullest of 4 ranks", "before", "kept", "peak"])
peak = {name: values[2] for name, values in peaks.items()}
assert peak["ZeRO-3, a unit per layer"] < peak["ZeRO-3, all in one unit"]
assert peak["ZeRO-3, a unit per layer"] < peak["ZeRO-3, keeps what it gathers"]
assert peak["ZeRO-3, a unit per layer"] < peak["ZeRO-1, ShardedOptimizer"] < peak["DDP"]

# %% name="activations"
SEQUENCES_EACH = (1, 4, 16)
ways = {"ddp": (ddp, False), "sharded": (zero3, False), "recomputed": (ddp, True)}
cases = [
    Case(method, SIZES[0], sequences, recompute)
    for sequences in SEQUENCES_EACH
    for method, recompute in ways.values()
]
values = iter(miniddp.run_ranks(peaks_of, 2, cases, timeout=300)[0])
lines = []
for sequences in SEQUENCES_EACH:
    kept = {way: next(values)[1] / MB for way in ways}
    lines.append([sequences, *(f"{kept[way]:.1f}" for way in ways)])
    assert abs(kept["sharded"] / kept["ddp"] - 1) < 0.1
    assert kept["recomputed"] < 0.5 * kept["ddp"]
columns = ["DDP", "ZeRO-3", "DDP, checkpointing"]
table(lines, ["batch per rank", *(f"{name}, MB" for name in columns)], align="rrrr")
record(
    activation_size=SIZES[0],
    activations_mb=kept["ddp"],
    model_states_mb=16 * counts[SIZES[0]] / MB,
    activations_factor=kept["ddp"] / kept["recomputed"],
)

# %% [markdown]
# ## Autocast's copies
#
# A batch of two tokens has hardly any activations. What forward leaves behind are then the weights
# that autocast has cast to bfloat16.


# %% name="autocast"
def kept_by_forward(rank: int, autocast: bool) -> float:
    """Bytes that one forward leaves behind for each weight of a linear layer."""
    model = build(SIZE, torch.device("cpu"))
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    ids = torch.tensor([[1, 2]])
    with LiveBytes(model.parameters()) as live:
        before = live.now()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids[:, 0]).loss
        kept = live.now() - before
        assert loss.requires_grad
    return kept / sum(weight.numel() for weight in weights)


lines = []
for autocast in (False, True):
    kept = miniddp.run_ranks(kept_by_forward, 1, autocast)[0]
    assert abs(kept - (2 if autocast else 0)) < 0.1, kept
    lines.append(["bfloat16, autocast" if autocast else "float32", f"{kept:.2f}"])
table(lines, ["forward in", "bytes kept per weight"], align="lr")

# %% [markdown]
# ## Save on four ranks, load on two and in one process


# %% name="saved-alone"
def save_alone(rank: int, file: str) -> None:
    warnings.simplefilter("ignore")
    model, _ = torch_zero3(build(SIZES[0], torch.device("cpu")))
    if rank == 0:
        torch.save(model.state_dict(), file)


def load_alone(rank: int, file: str) -> str:
    try:
        build(SIZES[0], torch.device("cpu")).load_state_dict(torch.load(file))
    except RuntimeError as error:
        return str(error)
    return "loaded"


with tempfile.TemporaryDirectory() as folder:
    file = os.path.join(folder, "model.pt")
    miniddp.run_ranks(save_alone, 4, file, timeout=300)
    in_file = os.path.getsize(file)
    reason = miniddp.run_ranks(load_alone, 1, file, timeout=300)[0]
assert in_file < 0.3 * 4 * counts[SIZES[0]]
assert "got mixed torch.Tensor and DTensor" in reason
print(f"the model:          {4 * counts[SIZES[0]] / MB:.2f} MB")
print(f"rank 0's file:      {in_file / MB:.2f} MB")
print("in a plain model:   " + re.search("got mixed .*? and DTensor", reason)[0])


# %% name="checkpoint"
def gather_whole(model: nn.Module) -> dict[str, Any]:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_model_state_dict(model, options=options)


def save_parts(model: nn.Module, optimizer: Optimizer, folder: str) -> None:
    weights, state = get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def load_parts(model: nn.Module, optimizer: Optimizer, folder: str) -> None:
    weights, state = get_state_dict(model, optimizer)
    parts = {"model": weights, "optimizer": state}
    checkpoint.load(parts, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=parts["model"],
        optim_state_dict=parts["optimizer"],
    )


def save(rank: int, folder: str) -> dict[str, Tensor]:
    warnings.simplefilter("ignore")
    where = torch.device("cpu")
    model, optimizer = torch_zero3(build(SIZES[0], where))
    step((model, optimizer), batch_of(rank * SEQUENCES, SEQUENCES, where))
    whole = gather_whole(model)
    print(f"gathered: {nbytes(whole.values()) / MB:.2f} MB")
    save_parts(model, optimizer, folder)
    return whole


def load(rank: int, folder: str, expected: dict[str, Tensor]) -> bool:
    warnings.simplefilter("ignore")
    where = torch.device("cpu")
    model, optimizer = torch_zero3(build(SIZES[0], where))
    load_parts(model, optimizer, folder)
    assert optimizer.state
    whole = gather_whole(model)
    return all(torch.equal(value, expected[name]) for name, value in whole.items())


with tempfile.TemporaryDirectory() as folder:
    saved = miniddp.run_ranks(save, 4, folder, timeout=300)
    assert miniddp.run_ranks(load, 2, folder, saved[0], timeout=300) == [True, True]
plain = build(SIZES[0], torch.device("cpu"))
plain.load_state_dict(saved[0])  # raises if a name or a shape is not that of the plain model
assert [bool(state) for state in saved] == [True, False, False, False]
show_ranks(saved)

# %% [markdown]
# ## On paper: 7 billion parameters on 8 GPUs of 80 GB


# %% name="paper"
PARAMETERS, GPUS, GB = 7 * 10**9, 8, 1e9
lines = []
for precision in ("fp32", "mixed"):
    each_precision = memory.bytes_per_parameter("adam", precision)
    for stage in range(4):
        need = memory.memory_per_rank(PARAMETERS, GPUS, stage, each_precision)
        parts = (need.parameters, need.gradients, need.optimizer, need.total)
        left = 80 - need.total / GB
        verdict = f"{left:.1f}" if left > 0 else "does not fit"
        name = f"ZeRO-{stage}" if stage else "DDP"
        lines.append([precision, name, *(f"{part / GB:.1f}" for part in parts), verdict])
columns = ["precision", "method", "parameters", "gradients", "Adam, copy", "sum, GB", "left of 80"]
table(lines, columns, align="llrrrrr")

# %% [markdown]
# ## On paper: models that others trained
#
# As many parameters as published, Adam in fp32. Where it makes a difference: on each of 8 GPUs, and
# on each of 64.

# %% name="models"
BILLIONS = {"ResNet-50": 0.0256, "BERT-Large": 0.34, "Llama 3 70B": 70, "GPT-3": 175}
lines = []
for name, billions in BILLIONS.items():
    line = [name, billions]
    for stage in range(4):
        needs = [memory.memory_per_rank(int(billions * 1e9), n, stage, each) for n in (8, 64)]
        gigabytes = [need.total / GB for need in needs]
        shown = [f"{value:,.{2 if value < 10 else 0}f}" for value in gigabytes]
        line.append(" / ".join(dict.fromkeys(shown)))
    lines.append(line)
columns = ["GB, 8 / 64 GPUs", "10⁹ parameters", "DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3"]
table(lines, columns, align="lrrrrr")

# %% [markdown]
# ## Stage 7, and the same program sharded


# %% name="stage"
def printed_by(program: str) -> list[list[str]]:
    command = ["torch.distributed.run", "--standalone", "--nproc_per_node=2", program]
    one_thread = {"OMP_NUM_THREADS": "1", "STEPS": "20", "CUDA_VISIBLE_DEVICES": ""}
    launched = subprocess.run(
        [sys.executable, "-m", *command],
        env={**os.environ, **one_thread},
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
    )
    return [line.rsplit(maxsplit=1) for line in launched.stdout.splitlines()]


whole, in_shards = printed_by("stages/7_ddp.py"), printed_by("runs/sharded.py")
rows = []
for (what, loss), (also, sharded) in zip(whole, in_shards, strict=True):
    assert what == also
    assert abs(float(loss) - float(sharded)) < 1e-3
    rows.append([what, loss, sharded])
table(rows, ["", "stage 7", "sharded"])
