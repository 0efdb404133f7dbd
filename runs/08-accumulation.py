# %% [markdown]
# # Gradient accumulation
#
# Several backward passes for one step of the optimizer, on two ranks: how often gradients are
# sent, what they equal, how much time that saves, and what goes wrong when the synchronisation
# stands on the wrong micro-batch, the loss is not divided, or micro-batches differ in size.

# %% name="setup"
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import miniddp
from book import data_dir, figure, provenance, record, show_ranks, table
from miniddp import DistributedDataParallel, SimpleDDP
from miniddp.accumulation import mean_weights
from miniddp.data import collate, encode, load_mrpc
from miniddp.model import load_model, load_tokenizer
from miniddp.process import device

WORLD_SIZE = 2
MICRO_BATCHES = 4
PAIRS = 2  # in each micro-batch
provenance(device=device(), world_size=WORLD_SIZE, backend="gloo")
pairs = load_mrpc(data_dir())
rows = pairs[:]
tokenizer = load_tokenizer(rows["sentence1"] + rows["sentence2"], "tiny", pretrained=False)
encoded = encode(pairs.select(range(64)), tokenizer, max_length=64)

Batch = dict[str, Tensor]


def batch_of(first: int, count: int) -> Batch:
    """Pairs `first` to `first + count - 1`, padded."""
    batch = collate([encoded[i] for i in range(first, first + count)], tokenizer)
    return {name: tensor.to(device()) for name, tensor in batch.items()}


def micro_batches(rank: int, count: int = MICRO_BATCHES) -> list[Batch]:
    """This rank's micro-batches; those of all ranks together are the first pairs of the corpus."""
    return [batch_of((rank * count + i) * PAIRS, PAIRS) for i in range(count)]


def build(size: str = "tiny") -> nn.Module:
    miniddp.set_seed(0)
    return load_model(size, pretrained=False).to(device())


class Traffic:
    """Counts the all-reduces of a DDP and the bytes of gradients that they carry."""

    def __init__(self, ddp: nn.Module) -> None:
        self.all_reduces = 0
        self.gradient_bytes = 0
        ddp.register_comm_hook(self, Traffic.hook)

    def hook(self, bucket):
        self.all_reduces += 1
        self.gradient_bytes += bucket.buffer().nbytes
        return allreduce_hook(None, bucket)


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


def distance(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """The largest difference between two lists of gradients."""
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


print(f"{len(pairs)} pairs; the first is {pairs[0]['sentence1']!r}")

# %% [markdown]
# ## Three ways to accumulate
#
# All three leave the same gradients. They differ in how often they send them.


# %% name="every-micro-batch"
def synchronise_every_time(ddp: nn.Module, batches: Sequence[Batch]) -> None:
    for batch in batches:
        loss = ddp(**batch).loss / len(batches)
        loss.backward()


# %% name="backward-only"
def no_sync_around_backward(ddp: nn.Module, batches: Sequence[Batch]) -> None:
    *first, last = batches
    for batch in first:
        loss = ddp(**batch).loss / len(batches)  # forward outside: it prepares a synchronisation
        with ddp.no_sync():
            loss.backward()
    (ddp(**last).loss / len(batches)).backward()


# %% name="both"
def no_sync_around_both(ddp: nn.Module, batches: Sequence[Batch]) -> None:
    *first, last = batches
    with ddp.no_sync():
        for batch in first:
            loss = ddp(**batch).loss / len(batches)
            loss.backward()
    (ddp(**last).loss / len(batches)).backward()


# %% name="ways"
Way = Callable[[nn.Module, Sequence[Batch]], None]
WAYS: dict[str, Way] = {
    "no `no_sync`": synchronise_every_time,
    "`no_sync` around backward only": no_sync_around_backward,
    "`no_sync` around forward and backward": no_sync_around_both,
}
WRAPPERS = {"torch": TorchDDP, "miniddp": DistributedDataParallel}


def joined_gradients() -> list[Tensor]:
    """What one process computes from all micro-batches of all ranks in one batch."""
    model = build()
    model(**batch_of(0, WORLD_SIZE * MICRO_BATCHES * PAIRS)).loss.backward()
    return gradients(model)


def traffic_of(rank: int, wrapper: str, way: Way) -> tuple[int, int, float]:
    """All-reduces and bytes of the second step, and how far its gradients are from one process."""
    ddp = WRAPPERS[wrapper](build())
    traffic = Traffic(ddp)
    way(ddp, micro_batches(rank))  # the first step rearranges the buckets
    ddp.zero_grad()
    before = traffic.all_reduces, traffic.gradient_bytes
    way(ddp, micro_batches(rank))
    calls, nbytes = traffic.all_reduces - before[0], traffic.gradient_bytes - before[1]
    return calls, nbytes, distance(gradients(ddp), joined_gradients())


lines = []
for name, way in WAYS.items():
    for wrapper in WRAPPERS:
        calls, nbytes, off = miniddp.run_ranks(traffic_of, WORLD_SIZE, wrapper, way)[0]
        assert off < 1e-5, "every way leaves the gradient of the joined batch"
        lines.append([name, wrapper, calls, f"{nbytes / 1e6:.1f}", f"{off:.0e}"])
table(
    lines, ["way", "DDP", "all-reduces", "MB of gradients", "difference from one process"], "llrrr"
)
parameters = sum(parameter.numel() for parameter in build().parameters())
calls = {(name, wrapper): count for name, wrapper, count, *_ in lines}
for wrapper in WRAPPERS:
    every, backward_only, both = (calls[name, wrapper] for name in WAYS)
    assert every == backward_only == MICRO_BATCHES * both, (every, backward_only, both)

# %% name="ways-values"
record(
    micro_batches=MICRO_BATCHES,
    pairs=PAIRS,
    joined_batch=WORLD_SIZE * MICRO_BATCHES * PAIRS,
    parameters=parameters,
    gradient_mb=4 * parameters / 1e6,
    all_reduces_every=calls["no `no_sync`", "torch"],
    all_reduces_both=calls["`no_sync` around forward and backward", "torch"],
)

# %% [markdown]
# ## What it saves
#
# The same micro-batches, with a synchronisation after every one or after the last. The two ways
# take turns.


# %% name="time"
SIZE = "25m" if device().type == "cuda" else "5m"
COUNTS = [1, 2, 4, 8]
ROUNDS = 7


def seconds_of(ddp: nn.Module, way: Way, batches: Sequence[Batch]) -> float:
    ddp.zero_grad()
    dist.barrier()
    if device().type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    way(ddp, batches)
    if device().type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(rank: int) -> dict[int, tuple[float, float]]:
    """Median seconds per micro-batch, synchronised every time and once, for each count."""
    ddp = TorchDDP(build(SIZE), gradient_as_bucket_view=True)
    ways = synchronise_every_time, no_sync_around_both
    batches = micro_batches(rank, max(COUNTS))
    for way in ways * 2:
        way(ddp, batches)
    found = {}
    for count in COUNTS:
        rounds = [[seconds_of(ddp, way, batches[:count]) for way in ways] for _ in range(ROUNDS)]
        every, once = (statistics.median(times) / count for times in zip(*rounds, strict=True))
        found[count] = every, once
    return found


times = miniddp.run_ranks(measure, WORLD_SIZE, timeout=120)[0]
table(
    [
        [count, f"{1e3 * every:.1f}", f"{1e3 * once:.1f}", f"{every / once:.2f}"]
        for count, (every, once) in times.items()
    ],
    ["micro-batches", "ms each, synchronised every time", "ms each, synchronised once", "ratio"],
)

# %% name="time-figure"
fig, axes = plt.subplots()
for label, index, marker in (("after every micro-batch", 0, "o"), ("after the last one", 1, "s")):
    axes.plot(COUNTS, [1e3 * times[count][index] for count in COUNTS], marker=marker, label=label)
axes.set(xlabel="micro-batches for one step", ylabel="ms for one micro-batch", ylim=(0, None))
axes.set_xticks(COUNTS)
axes.legend(title="synchronised")
figure(fig)

# %% name="time-values"
record(
    rounds=ROUNDS,
    time_parameters=sum(parameter.numel() for parameter in build(SIZE).parameters()) / 1e6,
    ratio_most=times[COUNTS[-1]][0] / times[COUNTS[-1]][1],
    most=COUNTS[-1],
)

# %% [markdown]
# ## What it is for: memory
#
# Backward needs what forward has kept: the activations. This adds up the bytes that autograd keeps
# in one forward pass, the weights left out.


# %% name="memory"
def kept_bytes(model: nn.Module, batch: Batch) -> int:
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**batch).loss  # alive until the sum is taken: no storage is used twice
    total = sum(kept.values())
    del loss
    return total


model = build()
whole = batch_of(0, MICRO_BATCHES * PAIRS)
whole_bytes = kept_bytes(model, whole)
micro_bytes = kept_bytes(model, {name: tensor[:PAIRS] for name, tensor in whole.items()})
table(
    [
        ["one batch", MICRO_BATCHES * PAIRS, f"{whole_bytes / 1e6:.1f}"],
        ["one micro-batch", PAIRS, f"{micro_bytes / 1e6:.1f}"],
    ],
    ["forward pass of", "pairs", "MB kept for backward"],
)
assert 0.8 < whole_bytes / micro_bytes / MICRO_BATCHES < 1.2
record(kept_ratio=whole_bytes / micro_bytes)

# %% [markdown]
# ## The loss must be divided
#
# Without the division the gradient is the sum over the micro-batches, not their mean.


# %% name="divide"
def first_step(optimizer_class: type[torch.optim.Optimizer], divide: bool) -> tuple[float, float]:
    """The norm of the gradient, and how far the first step moves the weights."""
    model = build()
    optimizer = optimizer_class(model.parameters(), lr=1e-3)
    start = [parameter.detach().clone() for parameter in model.parameters()]
    for batch in micro_batches(rank=0):
        loss = model(**batch).loss
        (loss / MICRO_BATCHES if divide else loss).backward()
    norm = nn.utils.get_total_norm(gradients(model)).item()
    optimizer.step()
    moved = [p.detach() - before for p, before in zip(model.parameters(), start, strict=True)]
    return norm, nn.utils.get_total_norm(moved).item()


steps = {
    (optimizer.__name__, divide): first_step(optimizer, divide)
    for optimizer in (torch.optim.SGD, torch.optim.AdamW)
    for divide in (True, False)
}
table(
    [
        [name, "yes" if divide else "no", f"{norm:.3f}", f"{moved:.3g}"]
        for (name, divide), (norm, moved) in steps.items()
    ],
    ["optimizer", "loss divided", "norm of the gradient", "norm of the step"],
    "llrr",
)
sgd_ratio = steps["SGD", False][1] / steps["SGD", True][1]
adam_ratio = steps["AdamW", False][1] / steps["AdamW", True][1]
assert abs(sgd_ratio - MICRO_BATCHES) < 1e-2
assert abs(adam_ratio - 1) < 0.05, "Adam divides by the size of the gradient"
record(sgd_ratio=sgd_ratio, adam_ratio=adam_ratio)

# %% [markdown]
# ## Which micro-batches are in a step?
#
# The model has one weight for each micro-batch. Micro-batch `i` gives weight `i` the gradient 1 on
# rank 0 and 3 on rank 1, and all others nothing. So 2 in place `i` is the mean of both ranks, 1 or
# 3 is what the rank had alone, and a dot means that the micro-batch is not in this step.


# %% name="probe"
class Probe(nn.Module):
    """A loss whose gradient shows which micro-batch and which rank it comes from."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count, device=device()))

    def forward(self, i: int, rank: int) -> Tensor:
        return self.weight[i] * (1 + 2 * rank)


def loop(rank: int, count: int, synchronises: Callable[[int], bool], steps: Callable[[int], bool]):
    """Torch's DDP over `count` micro-batches; shows `.grad` where the optimizer would step."""
    ddp = TorchDDP(Probe(count))
    found = []
    for i in range(count):
        with nullcontext() if synchronises(i) else ddp.no_sync():
            ddp(i, rank).backward()
        if steps(i):
            found.append([int(value) for value in ddp.module.weight.grad])
            print(f"after {i}:", *(value or "·" for value in found[-1]), flush=True)
            ddp.zero_grad()
    left = ddp.module.weight.grad
    if left is not None:
        print("left:   ", *(int(value) or "·" for value in left), flush=True)
    return found


# %% name="last"
def is_last(i: int) -> bool:
    return (i + 1) % 4 == 0


right = miniddp.run_ranks(loop, WORLD_SIZE, 8, is_last, is_last)
assert right[0] == right[1] == [[2, 2, 2, 2, 0, 0, 0, 0], [0, 0, 0, 0, 2, 2, 2, 2]]
show_ranks(right, "step and synchronise if (i + 1) % 4 == 0")


# %% name="first"
def is_first(i: int) -> bool:
    return i % 4 == 0


early = miniddp.run_ranks(loop, WORLD_SIZE, 8, is_first, is_first)
assert early[0] == early[1] == [[2, 0, 0, 0, 0, 0, 0, 0], [0, 2, 2, 2, 2, 0, 0, 0]]
assert all("left:    · · · · · " in text for text in early.outputs)
show_ranks(early, "step and synchronise if i % 4 == 0")

# %% name="disagree"
apart = miniddp.run_ranks(loop, WORLD_SIZE, 8, is_first, is_last)
assert apart[0][0] == [2, 1, 1, 1, 0, 0, 0, 0]
assert apart[1][0] == [2, 3, 3, 3, 0, 0, 0, 0]
show_ranks(apart, "synchronise if i % 4 == 0, step if (i + 1) % 4 == 0")

# %% name="rest"
COUNT = 6


def is_last_or_end(i: int) -> bool:
    return (i + 1) % 4 == 0 or i + 1 == COUNT


rest = miniddp.run_ranks(loop, WORLD_SIZE, COUNT, is_last_or_end, is_last_or_end)
assert rest[0] == rest[1] == [[2, 2, 2, 2, 0, 0], [0, 0, 0, 0, 2, 2]]
show_ranks(rest, "six micro-batches, and the last one always steps")

# %% [markdown]
# ## Micro-batches of different size
#
# A model that predicts each token from the one before it. The loss is a mean over tokens, and
# padding does not count. Texts differ in length, so micro-batches differ in tokens.


# %% name="tokens"
def next_tokens(batch: Batch) -> tuple[Tensor, Tensor]:
    """Every token of a batch with the token after it, padding left out."""
    ids, real = batch["input_ids"], batch["attention_mask"].bool()
    both = real[:, :-1] & real[:, 1:]
    return ids[:, :-1][both], ids[:, 1:][both]


def bigram() -> nn.Module:
    torch.manual_seed(0)
    vocabulary = len(tokenizer)
    model = nn.Sequential(nn.Embedding(vocabulary, 16), nn.Linear(16, vocabulary))
    return model.double().to(device())


def token_gradients(rank: int, weigh: bool) -> tuple[list[int], list[float], list[Tensor]]:
    ddp = DistributedDataParallel(bigram())
    batches = [next_tokens(batch) for batch in micro_batches(rank)]
    counts = [len(inputs) for inputs, _ in batches]
    weights = mean_weights(counts) if weigh else [1 / len(batches)] * len(batches)
    for i, ((inputs, targets), weight) in enumerate(zip(batches, weights, strict=True)):
        with ddp.no_sync() if i + 1 < len(batches) else nullcontext():
            loss = nn.functional.cross_entropy(ddp(inputs), targets)
            (weight * loss).backward()
    return counts, weights, [gradient.cpu() for gradient in gradients(ddp)]


model = bigram()
inputs, targets = next_tokens(batch_of(0, WORLD_SIZE * MICRO_BATCHES * PAIRS))
nn.functional.cross_entropy(model(inputs), targets).backward()
wanted = [gradient.cpu() for gradient in gradients(model)]
norm = nn.utils.get_total_norm(wanted).item()

off = {}
for weigh in (False, True):
    results = miniddp.run_ranks(token_gradients, WORLD_SIZE, weigh)
    difference = [a - b for a, b in zip(results[0][2], wanted, strict=True)]
    off[weigh] = nn.utils.get_total_norm(difference).item() / norm
for rank, (counts, weights, _) in enumerate(results):
    print(f"rank {rank}: tokens {counts}, weights {[round(weight, 3) for weight in weights]}")
table(
    [["1 / micro-batches", f"{off[False]:.1e}"], ["by tokens", f"{off[True]:.1e}"]],
    ["mean losses are weighted", "relative difference from one process"],
)
assert off[True] < 1e-12 < 1e-3 < off[False]

# %% name="tokens-values"
record(off_plain=100 * off[False], off_weighted=off[True])

# %% [markdown]
# ## An error inside `no_sync`
#
# The context manager puts the state back, whatever happens inside. Two calls do not.


# %% name="interrupted"
@contextmanager
def by_hand(model: SimpleDDP) -> Iterator[None]:
    """What looks like `no_sync`, without `finally`."""
    model.disable_grad_sync()
    yield
    model.enable_grad_sync()


def interrupted(rank: int) -> list[bool]:
    miniddp.set_seed(0)
    model = SimpleDDP(nn.Linear(2, 1).to(device()))
    states = []
    for name, manager in (("no_sync", model.no_sync()), ("by hand", by_hand(model))):
        try:
            with manager:
                raise ValueError("a bad sample")
        except ValueError as error:
            print(f"{name}: {error}; do_sync is {model.do_sync}", flush=True)
        states.append(model.do_sync)
    return states


states = miniddp.run_ranks(interrupted, WORLD_SIZE)
assert states[0] == states[1] == [True, False]
show_ranks(states)
