# %% [markdown]
# # Gradient accumulation
#
# Several backward passes for one step of the optimizer, on two ranks: how often gradients are
# sent, what they equal, what is kept in memory, and what goes wrong when the loss is not divided,
# the synchronisation stands on the wrong micro-batch, or micro-batches differ in size.

# %% name="setup"
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import miniddp
from book import provenance, record, show_ranks, table
from instruments.accumulation import (
    accumulate,
    accumulate_with,
    gradient_of_all_tokens,
    tokens_of,
    weighted_gradient,
)
from instruments.gradients import (
    flat_gradient,
    flat_weights,
    largest_difference,
    relative_error,
)
from instruments.held import bytes_kept_for_backward
from miniddp import DistributedDataParallel
from miniddp.accumulation import mean_weights
from miniddp.process import device
from shakespeare import build_language_model, load_text

WORLD_SIZE = 2
MICRO_BATCHES = 4
SEQUENCES = 2  # in each micro-batch
JOINED = WORLD_SIZE * MICRO_BATCHES * SEQUENCES
provenance(device=device(), world_size=WORLD_SIZE, backend="gloo")
record(joined_batch=JOINED)
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


def traffic_of(rank: int, wrapper: str, way: Way) -> tuple[int, int, Tensor]:
    """All-reduces and bytes of the second step, and its gradients."""
    ddp = WRAPPERS[wrapper](build())
    traffic = Traffic(ddp)
    way(ddp, micro_batches(rank))  # the first step rearranges the buckets
    ddp.zero_grad()
    traffic.all_reduces = traffic.gradient_bytes = 0
    way(ddp, micro_batches(rank))
    return traffic.all_reduces, traffic.gradient_bytes, flat_gradient(ddp)


whole = build()
loss_of(whole, text[:JOINED].to(device())).backward()
joined_gradient = flat_gradient(whole)
rows = []
for name, way in WAYS.items():
    found = [miniddp.run_ranks(traffic_of, WORLD_SIZE, wrapper, way)[0] for wrapper in WRAPPERS]
    calls, num_bytes, gradients = zip(*found, strict=True)
    off = max(largest_difference(gradient, joined_gradient) for gradient in gradients)
    assert off < 1e-5, "every way leaves the gradient of the joined batch"
    assert num_bytes[0] == num_bytes[1]
    rows.append([name, *calls, f"{num_bytes[0] / 1e6:.1f}", f"{off:.0e}"])
every_time, backward_only, both = (row[1:3] for row in rows)
assert every_time == backward_only == [MICRO_BATCHES * calls for calls in both]
table(rows, ["way", *WRAPPERS, "MB", "off by"], "lrrrr")

# %% [markdown]
# ## What it is for: memory
#
# Backward needs what forward has kept: the activations. This adds up the bytes that autograd keeps
# in one forward pass, the weights left out.

# %% name="memory"
model = build()
whole_bytes, micro_bytes = (
    bytes_kept_for_backward(model, lambda n=sequences: loss_of(model, text[:n].to(device())))
    for sequences in (MICRO_BATCHES * SEQUENCES, SEQUENCES)
)
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
    start = flat_weights(model)
    for batch in micro_batches(rank=0):
        loss = loss_of(model, batch)
        (loss / MICRO_BATCHES if divide else loss).backward()
    optimizer.step()
    moved = flat_weights(model) - start
    return flat_gradient(model).norm().item(), moved.norm().item()


rows = []
ratios = {}
for optimizer in (torch.optim.SGD, torch.optim.AdamW):
    divided, undivided = first_step(optimizer, divide=True), first_step(optimizer, divide=False)
    ratios[optimizer.__name__] = undivided[1] / divided[1]
    for answer, (norm, moved) in (("yes", divided), ("no", undivided)):
        rows.append([optimizer.__name__, answer, f"{norm:.3f}", f"{moved:.3g}"])
assert abs(ratios["SGD"] - MICRO_BATCHES) < 1e-2
assert abs(ratios["AdamW"] - 1) < 0.05, "Adam divides by the size of the gradient"
record(sgd_ratio=ratios["SGD"])
table(rows, ["optimizer", "loss divided", "norm of the gradient", "norm of the step"], "llrr")

# %% [markdown]
# ## Which micro-batches are in a step?
#
# The model has one weight for each micro-batch. Micro-batch `i` gives weight `i` the gradient 1 on
# rank 0 and 3 on rank 1, and all others nothing. So 2 in place `i` is the mean of both ranks, 1 or
# 3 is what the rank had alone, and a dot means that the micro-batch is not in this step.


# %% name="last"
def is_last(i: int) -> bool:
    return (i + 1) % 4 == 0


right = miniddp.run_ranks(accumulate, WORLD_SIZE, 8, is_last, is_last)
assert right[0] == right[1] == [[2, 2, 2, 2, 0, 0, 0, 0], [0, 0, 0, 0, 2, 2, 2, 2]]
show_ranks(right, "step and synchronise if (i + 1) % 4 == 0")


# %% name="first"
def is_first(i: int) -> bool:
    return i % 4 == 0


early = miniddp.run_ranks(accumulate, WORLD_SIZE, 8, is_first, is_first)
assert early[0] == early[1] == [[2, 0, 0, 0, 0, 0, 0, 0], [0, 2, 2, 2, 2, 0, 0, 0]]
assert all("left:    · · · · · " in text for text in early.outputs)
show_ranks(early, "step and synchronise if i % 4 == 0")

# %% name="disagree"
apart = miniddp.run_ranks(accumulate, WORLD_SIZE, 8, is_first, is_last)
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


once = miniddp.run_ranks(accumulate_with, WORLD_SIZE, 8, reduce_in_the_fourth, is_last)
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
Lengths = list[list[int]]  # by rank, of each micro-batch
UNLIKE: Lengths = [[9, 33, 65, 17], [25, 49, 13, 5]]


def cut(rank: int, lengths: Lengths) -> list[Tensor]:
    pairs = zip(micro_batches(rank), lengths[rank], strict=True)
    return [batch[:, :length] for batch, length in pairs]


def token_gradient(rank: int, lengths: Lengths, weigh: bool) -> Tensor:
    batches = cut(rank, lengths)
    counts = [tokens_of(batch) for batch in batches]
    weights = mean_weights(counts) if weigh else [1 / len(batches)] * len(batches)
    print("tokens ", *(f"{count:4}" for count in counts))
    print("weights", *(f"{weight:4.2f}" for weight in weights))
    return weighted_gradient(build().double(), batches, weights)


def every_token_alike(lengths: Lengths) -> Tensor:
    batches = [batch for rank in range(WORLD_SIZE) for batch in cut(rank, lengths)]
    return gradient_of_all_tokens(build().double(), batches)


wanted = every_token_alike(UNLIKE)
by_count = miniddp.run_ranks(token_gradient, WORLD_SIZE, UNLIKE, False)
by_tokens = miniddp.run_ranks(token_gradient, WORLD_SIZE, UNLIKE, True)
off_plain, off_weighted = (relative_error(found[0], wanted) for found in (by_count, by_tokens))
assert off_weighted < 1e-6 < 1e-2 < off_plain
show_ranks(by_tokens)
rows = [["1 / micro-batches", f"{off_plain:.1e}"], ["by tokens", f"{off_weighted:.1e}"]]
table(rows, ["mean losses are weighted", "relative error"])
record(off_plain=100 * off_plain)

# %% [markdown]
# The same with lengths that differ less, by a third at most.

# %% name="tokens-alike"
ALIKE: Lengths = [[49, 57, 65, 53], [61, 49, 53, 65]]
plain = miniddp.run_ranks(token_gradient, WORLD_SIZE, ALIKE, False)[0]
off_alike = relative_error(plain, every_token_alike(ALIKE))
assert 1e-3 < off_alike < off_plain / 2
record(off_alike=100 * off_alike)
