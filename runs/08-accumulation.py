# %% [markdown]
# # Gradient accumulation
#
# Several backward passes for one step of the optimizer, on two ranks: how often gradients are
# sent, what they equal, what is kept in memory, and what goes wrong when the loss is not divided,
# the synchronisation stands on the wrong micro-batch, or micro-batches differ in size.

# %% name="setup"
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import miniddp
from book import provenance, record, show_ranks, table
from miniddp import DistributedDataParallel
from miniddp.accumulation import mean_weights
from miniddp.process import device
from shakespeare import build_language_model, load_text

WORLD_SIZE = 2
MICRO_BATCHES = 4
SEQUENCES = 2  # in each micro-batch
provenance(device=device(), world_size=WORLD_SIZE, backend="gloo")
text, _ = load_text()


def micro_batches(rank: int, count: int = MICRO_BATCHES) -> list[Tensor]:
    """This rank's micro-batches; those of all ranks together are the text's first sequences."""
    mine = text[rank * count * SEQUENCES :][: count * SEQUENCES]
    return list(mine.to(device()).split(SEQUENCES))


def build() -> nn.Module:
    miniddp.set_seed(0)
    return build_language_model().to(device())


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(input_ids=batch, labels=batch).loss


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


print(f"{len(text):,} sequences of {text.shape[1]} tokens")

# %% [markdown]
# ## Three ways to accumulate
#
# All three leave the same gradients. They differ in how often they send them.


# %% name="every-micro-batch"
def synchronise_every_time(ddp: nn.Module, batches: Sequence[Tensor]) -> None:
    for batch in batches:
        loss = loss_of(ddp, batch) / len(batches)
        loss.backward()


# %% name="backward-only"
def no_sync_around_backward(ddp: nn.Module, batches: Sequence[Tensor]) -> None:
    *first, last = batches
    for batch in first:
        loss = loss_of(ddp, batch) / len(batches)
        with ddp.no_sync():
            loss.backward()
    (loss_of(ddp, last) / len(batches)).backward()


# %% name="both"
def no_sync_around_both(ddp: nn.Module, batches: Sequence[Tensor]) -> None:
    *first, last = batches
    with ddp.no_sync():
        for batch in first:
            loss = loss_of(ddp, batch) / len(batches)
            loss.backward()
    (loss_of(ddp, last) / len(batches)).backward()


# %% name="ways"
Way = Callable[[nn.Module, Sequence[Tensor]], None]
WAYS: dict[str, Way] = {
    "no `no_sync`": synchronise_every_time,
    "`no_sync` around backward only": no_sync_around_backward,
    "`no_sync` around forward and backward": no_sync_around_both,
}
WRAPPERS = {"torch": TorchDDP, "miniddp": DistributedDataParallel}


def joined_gradients() -> list[Tensor]:
    """What one process computes from all micro-batches of all ranks in one batch."""
    model = build()
    loss_of(model, text[: WORLD_SIZE * MICRO_BATCHES * SEQUENCES].to(device())).backward()
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


lines, counts = [], {}
for name, way in WAYS.items():
    found = [miniddp.run_ranks(traffic_of, WORLD_SIZE, each, way)[0] for each in WRAPPERS]
    calls, nbytes, off = zip(*found, strict=True)
    assert max(off) < 1e-5, "every way leaves the gradient of the joined batch"
    assert len(set(nbytes)) == 1
    lines.append([name, *calls, f"{nbytes[0] / 1e6:.1f}", f"{max(off):.0e}"])
    counts[name] = calls
table(
    lines,
    ["way", *WRAPPERS, "MB", "off by"],
    "lrrrr",
)
parameters = sum(parameter.numel() for parameter in build().parameters())
for every, backward_only, both in zip(*counts.values(), strict=True):
    assert every == backward_only == MICRO_BATCHES * both, (every, backward_only, both)

# %% name="ways-values"
record(
    micro_batches=MICRO_BATCHES,
    joined_batch=WORLD_SIZE * MICRO_BATCHES * SEQUENCES,
    parameters=parameters,
    gradient_mb=4 * parameters / 1e6,
)

# %% [markdown]
# ## What it saves
#
# The same micro-batches, with a synchronisation after every one or after the last. The two ways
# take turns.


# %% name="time"
COUNTS = [1, 2, 4, 8]
ROUNDS = 7


def seconds_of(ddp: nn.Module, way: Way, batches: Sequence[Tensor]) -> float:
    ddp.zero_grad()
    dist.barrier()
    if device().type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    way(ddp, batches)
    if device().type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(rank: int) -> dict[int, list[tuple[float, float]]]:
    """Seconds per micro-batch, synchronised every time and once, in each round of each count."""
    ddp = TorchDDP(build(), gradient_as_bucket_view=True)
    ways = synchronise_every_time, no_sync_around_both
    batches = micro_batches(rank, max(COUNTS))
    for way in ways * 2:
        way(ddp, batches)
    found = {}
    for count in COUNTS:
        rounds = [[seconds_of(ddp, way, batches[:count]) for way in ways] for _ in range(ROUNDS)]
        found[count] = [(every / count, once / count) for every, once in rounds]
    return found


times = miniddp.run_ranks(measure, WORLD_SIZE, timeout=120)[0]
rows = []
for count, rounds in times.items():
    every, once = (1e3 * statistics.median(column) for column in zip(*rounds, strict=True))
    ratios = sorted(first / second for first, second in rounds)
    spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    rows.append([count, f"{every:.1f}", f"{once:.1f}", spread])
table(
    rows,
    ["micro-batches", "ms each, every time", "ms each, once", "ratio (lowest to highest)"],
    "rrrr",
)

# %% [markdown]
# ## What it is for: memory
#
# Backward needs what forward has kept: the activations. This adds up the bytes that autograd keeps
# in one forward pass, the weights left out.


# %% name="memory"
def kept_bytes(model: nn.Module, batch: Tensor) -> int:
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(model, batch)  # alive until the sum is taken: no storage is used twice
    total = sum(kept.values())
    del loss
    return total


model = build()
whole = text[: MICRO_BATCHES * SEQUENCES].to(device())
whole_bytes, micro_bytes = kept_bytes(model, whole), kept_bytes(model, whole[:SEQUENCES])
assert 0.8 < whole_bytes / micro_bytes / MICRO_BATCHES < 1.2
record(kept_whole_mb=whole_bytes / 1e6, kept_micro_mb=micro_bytes / 1e6)

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
        loss = loss_of(model, batch)
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


def shown(i: int, gradient: Tensor) -> list[int]:
    values = [int(value) for value in gradient]
    print(f"after {i}:", *(value or "·" for value in values), flush=True)
    return values


def loop(rank: int, count: int, synchronises: Callable[[int], bool], steps: Callable[[int], bool]):
    """Torch's DDP over `count` micro-batches; shows `.grad` where the optimizer would step."""
    ddp = TorchDDP(Probe(count))
    found = []
    for i in range(count):
        with nullcontext() if synchronises(i) else ddp.no_sync():
            ddp(i, rank).backward()
        if steps(i):
            found.append(shown(i, ddp.module.weight.grad))
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

# %% [markdown]
# The same with a hook of one's own that counts its calls.


# %% name="counter"
def reduce_in_the_fourth(parameter: nn.Parameter) -> None:
    calls = 0

    def hook(parameter: Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)

    parameter.register_post_accumulate_grad_hook(hook)


def counted(rank: int) -> list[list[int]]:
    model = Probe(8)
    reduce_in_the_fourth(model.weight)
    found = []
    for i in range(8):
        model(i, rank).backward()
        if is_last(i):
            found.append(shown(i, model.weight.grad))
            model.zero_grad()
    return found


once = miniddp.run_ranks(counted, WORLD_SIZE)
assert once[0] == [[2, 2, 2, 2, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1, 1]]
assert once[1] == [[2, 2, 2, 2, 0, 0, 0, 0], [0, 0, 0, 0, 3, 3, 3, 3]]
show_ranks(once, "a hook that synchronises in its fourth call")

# %% [markdown]
# ## Micro-batches of different size
#
# The loss is a mean over tokens. The texts of a micro-batch are cut to one length, and each
# micro-batch has a length of its own, so they differ in tokens. In float64, so that rounding is out
# of the way.

# %% name="tokens"
LENGTHS = [[9, 33, 65, 17], [25, 49, 13, 5]]


def cut(rank: int) -> list[Tensor]:
    pairs = zip(micro_batches(rank), LENGTHS[rank], strict=True)
    return [batch[:, :length] for batch, length in pairs]


def tokens_of(batch: Tensor) -> int:
    """How many are predicted: in each sequence all but the first."""
    return batch[:, 1:].numel()


def token_gradients(rank: int, weigh: bool) -> list[Tensor]:
    ddp = DistributedDataParallel(build().double())
    batches = cut(rank)
    counts = [tokens_of(batch) for batch in batches]
    weights = mean_weights(counts) if weigh else [1 / len(batches)] * len(batches)
    print("tokens ", *(f"{count:4}" for count in counts))
    print("weights", *(f"{weight:4.2f}" for weight in weights))
    for i, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
        with ddp.no_sync() if i + 1 < len(batches) else nullcontext():
            (weight * loss_of(ddp, batch)).backward()
    return [gradient.cpu() for gradient in gradients(ddp)]


def every_token_alike() -> list[Tensor]:
    """The gradient of the mean over all tokens, on one process."""
    model = build().double()
    batches = [batch for rank in range(WORLD_SIZE) for batch in cut(rank)]
    total = sum(tokens_of(batch) for batch in batches)
    for batch in batches:
        (loss_of(model, batch) * tokens_of(batch) / total).backward()
    return [gradient.cpu() for gradient in gradients(model)]


wanted = every_token_alike()
norm = nn.utils.get_total_norm(wanted).item()
off = {}
for weigh in (False, True):
    results = miniddp.run_ranks(token_gradients, WORLD_SIZE, weigh)
    difference = [a - b for a, b in zip(results[0], wanted, strict=True)]
    off[weigh] = nn.utils.get_total_norm(difference).item() / norm
show_ranks(results)
table(
    [["1 / micro-batches", f"{off[False]:.1e}"], ["by tokens", f"{off[True]:.1e}"]],
    ["mean losses are weighted", "relative error"],
)
assert off[True] < 1e-6 < 1e-2 < off[False]
record(off_plain=100 * off[False])
