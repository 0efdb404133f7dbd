# %% [markdown]
# # Synchronise gradients
#
# Ranks that train on different data drift apart. This run measures the drift on real sentence
# pairs, stops it with one all-reduce per parameter, compares the result with a single process,
# looks at a parameter that not every rank uses, counts the messages, and shows broken ways to
# synchronise next to what mends them.

# %% name="setup"
import statistics
import textwrap
import time
from collections.abc import Callable, Sequence
from unittest import mock

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import miniddp
from book import FOREGROUND, MUTED, data_dir, figure, provenance, record, show_ranks, table
from miniddp.data import collate, encode, load_mrpc
from miniddp.model import load_model, load_tokenizer
from miniddp.process import device
from miniddp.replicate import verify_replicas

WORLD_SIZES = [2, 4]
PAIRS_PER_RANK = 8
provenance(device=device(), world_size=WORLD_SIZES, backend="gloo")
pairs = load_mrpc(data_dir())
rows = pairs[:]
tokenizer = load_tokenizer(rows["sentence1"] + rows["sentence2"], "tiny", pretrained=False)
encoded = encode(pairs.select(range(min(512, len(pairs)))), tokenizer, max_length=128)

Batch = dict[str, Tensor]


def joined_batch(step: int, world_size: int) -> Batch:
    """The pairs of all ranks in one step, padded together."""
    size = world_size * PAIRS_PER_RANK
    rows = [encoded[(step * size + i) % len(encoded)] for i in range(size)]
    return {name: tensor.to(device()) for name, tensor in collate(rows, tokenizer).items()}


def own_part(batch: Batch, rank: int, world_size: int) -> Batch:
    return {name: tensor.chunk(world_size)[rank] for name, tensor in batch.items()}


def build(seed: int = 0) -> nn.Module:
    miniddp.set_seed(seed)
    return load_model("tiny", pretrained=False).to(device())


def spread(model: nn.Module) -> float:
    """The largest difference of any weight between any two ranks."""
    largest = 0.0
    for parameter in model.parameters():
        low, high = parameter.detach().clone(), parameter.detach().clone()
        dist.all_reduce(low, dist.ReduceOp.MIN)
        dist.all_reduce(high, dist.ReduceOp.MAX)
        largest = max(largest, (high - low).max().item())
    return largest


def say(text: str) -> None:
    """Prints at once, in lines that are short enough for two ranks beside each other."""
    print(textwrap.fill(text, 34, subsequent_indent="  "), flush=True)


print(pairs[0]["sentence1"])
print(encoded[0]["input_ids"][:12], "…")

# %% [markdown]
# ## Without synchronisation the ranks drift apart
#
# Same initial weights, different pairs, no communication.


# %% name="drift"
def train(rank: int, world_size: int, synchronise: bool, steps: int) -> list[float]:
    ddp = miniddp.SimpleDDP(build())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    spreads = [spread(ddp)]
    for step in range(steps):
        batch = own_part(joined_batch(step, world_size), rank, world_size)
        ddp(**batch).loss.backward()
        if synchronise:
            ddp.sync_gradients()
        optimizer.step()
        optimizer.zero_grad()
        spreads.append(spread(ddp))
    return spreads


STEPS = 20
drifted = miniddp.run_ranks(train, 4, 4, False, STEPS)[0]
synchronised = miniddp.run_ranks(train, 4, 4, True, STEPS)[0]
assert drifted[0] == 0, "the replicas start equal"
assert all(value > 0 for value in drifted[1:])
assert drifted[-1] > 2 * drifted[1]
assert all(value == 0 for value in synchronised), "synchronised replicas stay equal, bit for bit"

fig, axes = plt.subplots()
axes.plot(drifted, marker="o", color=FOREGROUND, label="without synchronisation")
axes.plot(synchronised, "--", marker="s", color=MUTED, label="with sync_gradients()")
axes.set(xlabel="step", ylabel="largest difference of a weight", xticks=range(0, STEPS + 1, 5))
axes.legend()
figure(fig)

# %% name="drift-values"
record(
    steps=STEPS,
    drift_after_one=drifted[1],
    drift_after_all=drifted[-1],
    synchronised_difference=max(synchronised),
)

# %% [markdown]
# ## One parameter, before and after
#
# The gradient of the classification head, on two ranks. Each rank computed it from its own pairs.


# %% name="before-after"
def show_gradient(rank: int) -> tuple[list[float], list[float]]:
    ddp = miniddp.SimpleDDP(build())
    ddp(**own_part(joined_batch(0, 2), rank, 2)).loss.backward()
    gradient = ddp.module.score.weight.grad
    before = gradient.flatten()[:3].tolist()
    ddp.sync_gradients()
    after = gradient.flatten()[:3].tolist()
    print("own: ", " ".join(f"{value:+.5f}" for value in before))
    print("mean:", " ".join(f"{value:+.5f}" for value in after))
    return before, after


gradients = miniddp.run_ranks(show_gradient, 2)
(own_0, mean_0), (own_1, mean_1) = gradients
assert mean_0 == mean_1
assert own_0 != own_1
for a, b, mean in zip(own_0, own_1, mean_0, strict=True):
    assert abs((a + b) / 2 - mean) < 1e-6
show_ranks(gradients)

# %% [markdown]
# ## Divide, then add
#
# float16 ends at 65,504. The same two gradients on two ranks, averaged in both orders.


# %% name="float16"
LARGE, SMALL = 40_000, 2**-24  # 2**-24 is the smallest float16 above zero


def average_float16(rank: int, value: float) -> tuple[float, float]:
    sum_first = torch.tensor(value, dtype=torch.float16, device=device())
    divide_first = sum_first.clone()
    dist.all_reduce(sum_first)
    sum_first /= dist.get_world_size()
    divide_first /= dist.get_world_size()
    dist.all_reduce(divide_first)
    return sum_first.item(), divide_first.item()


averages = {value: miniddp.run_ranks(average_float16, 2, value)[0] for value in (LARGE, SMALL)}
assert averages[LARGE] == (float("inf"), LARGE)
assert averages[SMALL] == (SMALL, 0)


def short(value: float) -> str:
    return f"{value:,.0f}" if value > 1 else f"{value:.2g}"


table(
    [[short(value), *map(short, averages[value])] for value in averages],
    ["gradient on both ranks", "add, then divide", "divide, then add"],
    align="rrr",
)

# %% [markdown]
# ## After backward, not before
#
# A small model takes one step with somebody's way to synchronise. Each gradient is then compared
# with this rank's own one and with the mean of all ranks.


# %% name="harness"
Install = Callable[[nn.Module], Callable[[], None]]


def small_model() -> nn.Module:
    miniddp.set_seed(0)
    layers = nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)
    return nn.Sequential(*layers).to(device())


def backward(model: nn.Module, micro_batches: Sequence[Tensor]) -> None:
    for inputs in micro_batches:
        (model(inputs).square().mean() / len(micro_batches)).backward()


def origin(gradient: Tensor, own: Tensor) -> str:
    """Says whether a gradient is this rank's own, the mean of all ranks, or something else."""
    mean = own / dist.get_world_size()
    dist.all_reduce(mean)
    if torch.allclose(gradient, mean, rtol=1e-4, atol=1e-7):
        return "mean of the ranks"
    return "own gradient" if torch.equal(gradient, own) else "neither of the two"


def step_with(rank: int, install: Install, number_of_micro_batches: int) -> list[str]:
    """Trains one step, synchronised as `install` does; says where each gradient comes from."""
    torch.manual_seed(100 + rank)
    micro_batches = [torch.randn(4, 8, device=device()) for _ in range(number_of_micro_batches)]
    model, alone = small_model(), small_model()
    finish = install(model)
    backward(model, micro_batches)
    finish()
    backward(alone, micro_batches)
    pairs = zip(model.named_parameters(), alone.parameters(), strict=True)
    origins = {name: origin(parameter.grad, own.grad) for (name, parameter), own in pairs}
    for kind in dict.fromkeys(origins.values()):
        names = [name for name in origins if origins[name] == kind]
        say(f"{kind}: {'all parameters' if len(names) == len(origins) else ' '.join(names)}")
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    try:
        verify_replicas(model)
        say("replicas afterwards: identical")
    except ValueError:
        say("replicas afterwards: different")
    return list(origins.values())


def nothing() -> None:
    pass


# %% name="too-early"
def synchronise_before_backward(model: nn.Module) -> Callable[[], None]:
    miniddp.SimpleDDP(model).sync_gradients()
    return nothing


too_early = miniddp.run_ranks(step_with, 2, synchronise_before_backward, 1)
assert all(set(origins) == {"own gradient"} for origins in too_early)
assert all("different" in text for text in too_early.outputs)
show_ranks(too_early)


# %% name="after-backward"
def synchronise_after_backward(model: nn.Module) -> Callable[[], None]:
    return miniddp.SimpleDDP(model).sync_gradients


in_time = miniddp.run_ranks(step_with, 2, synchronise_after_backward, 1)
assert all(set(origins) == {"mean of the ranks"} for origins in in_time)
assert all("identical" in text for text in in_time.outputs)
show_ranks(in_time)

# %% [markdown]
# ## The mean is the gradient of the joined batch
#
# One process takes the pairs of all ranks as one batch. Its gradient is compared, parameter by
# parameter, with the gradient of each rank: once in float32, once in float64.


# %% name="joined"
def compare(rank: int, world_size: int, dtype: torch.dtype) -> tuple[float, float]:
    batch = joined_batch(0, world_size)
    ddp, single = miniddp.SimpleDDP(build().to(dtype)), build().to(dtype)
    ddp(**own_part(batch, rank, world_size)).loss.backward()
    single(**batch).loss.backward()
    before = largest_gradient_difference(ddp.module, single)
    ddp.sync_gradients()
    return before, largest_gradient_difference(ddp.module, single)


def largest_gradient_difference(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max((x.grad - y.grad).abs().max().item() for x, y in pairs)


rows = []
for world_size in WORLD_SIZES:
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-14)):
        differences = miniddp.run_ranks(compare, world_size, world_size, dtype)
        before, after = (max(values) for values in zip(*differences, strict=True))
        assert before > 1e-2
        assert after < tolerance, "only rounding may remain"
        name = str(dtype).removeprefix("torch.")
        rows.append([world_size, name, f"{before:.1e}", f"{after:.1e}"])
        record(
            **{f"before_{world_size}_{name}": before, f"after_{world_size}_{name}": after},
        )
table(rows, ["ranks", "dtype", "difference before", "difference after"], align="rlrr")

# %% [markdown]
# ## A parameter that not every rank uses
#
# Two heads on one body. In the first case rank 0 uses the left head and rank 1 the right one.


# %% name="missing-simple"
class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, inputs: Tensor, heads: Sequence[str]) -> Tensor:
        hidden = self.body(inputs).tanh()
        return sum(getattr(self, head)(hidden).sum() for head in heads)


def two_heads() -> nn.Module:
    miniddp.set_seed(0)
    return TwoHeads().to(device())


def own_inputs(rank: int) -> Tensor:
    torch.manual_seed(100 + rank)
    return torch.randn(2, 4, device=device())


def miss_with_simple_ddp(rank: int) -> str:
    ddp = miniddp.SimpleDDP(two_heads())
    ddp(own_inputs(rank), ["left"] if rank == 0 else ["right"]).backward()
    before = ddp.module.body.weight.grad.clone()
    try:
        ddp.sync_gradients()
    except RuntimeError as error:
        assert torch.equal(ddp.module.body.weight.grad, before), "no gradient was changed"
        say(f"sync_gradients raises RuntimeError: {error}")
        return str(error)
    return ""


missed = miniddp.run_ranks(miss_with_simple_ddp, 2)
assert all("'left.weight' has a gradient on 1 of 2 ranks" in error for error in missed)
show_ranks(missed)


# %% name="missing-torch"
def miss_with_torch(rank: int, heads_of: Sequence[Sequence[str]]) -> list[float] | None:
    ddp = DistributedDataParallel(two_heads())
    gradient = None
    try:
        for step in range(2):
            loss = ddp(own_inputs(rank), heads_of[rank])
            say(f"step {step}: forward passes")
            loss.backward()
            say(f"step {step}: backward passes")
            gradient = ddp.module.body.weight.grad.flatten()[:2].tolist()
            say("  body.weight.grad: " + " ".join(f"{value:+.3f}" for value in gradient))
    except RuntimeError as error:
        say(f"step {step}: RuntimeError: {str(error).partition('.')[0]}")
    dist.barrier()
    return gradient


both_miss = miniddp.run_ranks(miss_with_torch, 2, [["left"], ["right"]])
assert both_miss[0] != both_miss[1], "the gradients were not synchronised"
for text in both_miss.outputs:
    assert "step 0: backward passes" in text
    assert "step 1: RuntimeError: Expected to have finished reduction" in " ".join(text.split())
show_ranks(both_miss)

# %% [markdown]
# In the second case rank 0 uses both heads and rank 1 the left one only. Rank 0 has every gradient
# that it waits for, starts its all-reduce, and waits for rank 1, which never starts one.


# %% name="missing-one-side"
try:
    miniddp.run_ranks(miss_with_torch, 2, [["left", "right"], ["left"]], timeout=20)
    raise AssertionError("rank 0 did not wait")
except miniddp.launch.RanksTimedOut as error:
    one_side = error
assert "in backward" in one_side.stacks[0]
assert "backward passes" not in one_side.outputs[0]
assert "step 1: RuntimeError: Expected to" in " ".join(one_side.outputs[1].split())
show_ranks(
    [
        one_side.outputs[0] + "… and waits in backward",
        one_side.outputs[1],
    ]
)

# %% [markdown]
# ## What one all-reduce per parameter costs
#
# The gradients of one model, summed over two ranks: tensor by tensor, and as one long tensor of the
# same bytes. The two take turns; the table has the median of each.


# %% name="collectives"
ROUNDS = 15


def count_all_reduces(rank: int) -> tuple[int, int]:
    """All-reduces of gradients, and of the counts that the check compares."""
    ddp = miniddp.SimpleDDP(build())
    ddp(**own_part(joined_batch(0, 2), rank, 2)).loss.backward()
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        ddp.sync_gradients()
    of_gradients = sum(call.args[0].is_floating_point() for call in all_reduce.call_args_list)
    return of_gradients, all_reduce.call_count - of_gradients


def seconds_to_reduce(tensors: Sequence[Tensor]) -> float:
    dist.barrier()
    start = time.perf_counter()
    for tensor in tensors:
        dist.all_reduce(tensor)
    if tensors[0].is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def compare_sizes(rank: int, size: str) -> tuple[int, int, float, float]:
    model = load_model(size, pretrained=False)
    one_by_one = [torch.zeros_like(parameter, device=device()) for parameter in model.parameters()]
    together = [torch.cat([tensor.flatten() for tensor in one_by_one])]
    seconds = [(seconds_to_reduce(one_by_one), seconds_to_reduce(together)) for _ in range(ROUNDS)]
    separate, joined = (statistics.median(values) for values in zip(*seconds, strict=True))
    return len(one_by_one), together[0].nbytes, separate, joined


counts = miniddp.run_ranks(count_all_reduces, 2)
assert counts[0] == counts[1] == (len(list(build().parameters())), 1)
record(all_reduces=counts[0][0], rounds=ROUNDS)

rows = []
for size in ("tiny", "5m", "25m"):
    tensors, num_bytes, separate, joined = miniddp.run_ranks(compare_sizes, 2, size, timeout=120)[0]
    milliseconds = [f"{separate * 1e3:.1f}", f"{joined * 1e3:.1f}"]
    rows.append([size, tensors, f"{num_bytes / 1e6:.1f}", *milliseconds])
    record(**{f"ratio_{size}": separate / joined})
table(rows, ["model", "tensors", "MB", "ms one by one", "ms as one"])

# %% [markdown]
# ## When a hook is called, and with what
#
# One weight of 2, the loss 3 w, two backward passes without `zero_grad` between them.


# %% name="two-hooks"
weight = nn.Parameter(torch.tensor(2.0))
seen: list[tuple[float, float | None]] = []


def look(name: str, argument: Tensor) -> None:
    accumulated = None if weight.grad is None else weight.grad.item()
    seen.append((argument.item(), accumulated))
    print(f"{name:37} gets {argument.item():.0f}, .grad is {accumulated}")


weight.register_hook(lambda gradient: look("register_hook", gradient))
weight.register_post_accumulate_grad_hook(
    lambda parameter: look("register_post_accumulate_grad_hook", parameter)
)
for _ in range(2):
    (3 * weight).backward()
assert seen == [(3, None), (2, 3), (3, 3), (2, 6)]

# %% name="ready-order"
model = small_model()
order: list[str] = []
for name, parameter in model.named_parameters():
    parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
backward(model, [torch.randn(4, 8, device=device())])
assert order == [name for name, _ in model.named_parameters()][::-1]
print("ready:", ", ".join(order))

# %% [markdown]
# ## Three ways to get it wrong
#
# Each of these runs without an error.
#
# ### A hook that reduces the parameter
#
# `register_post_accumulate_grad_hook` calls the hook with the *parameter*. The mean of equal
# weights is the same weights: nothing changes, and the gradients stay local.


# %% name="bug-parameter"
def reduce_the_argument(model: nn.Module) -> Callable[[], None]:
    def hook(gradient: Tensor) -> None:
        gradient /= dist.get_world_size()
        dist.all_reduce(gradient)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    return nothing


wrong_argument = miniddp.run_ranks(step_with, 2, reduce_the_argument, 1)
assert all(set(origins) == {"own gradient"} for origins in wrong_argument)
assert all("different" in text for text in wrong_argument.outputs)
show_ranks(wrong_argument)


# %% name="fix-parameter"
def reduce_the_gradient(model: nn.Module) -> Callable[[], None]:
    def hook(parameter: Tensor) -> None:
        parameter.grad /= dist.get_world_size()
        dist.all_reduce(parameter.grad)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    return nothing


right_argument = miniddp.run_ranks(step_with, 2, reduce_the_gradient, 1)
assert all(set(origins) == {"mean of the ranks"} for origins in right_argument)
assert all("identical" in text for text in right_argument.outputs)
show_ranks(right_argument)

# %% [markdown]
# ### `register_hook` under accumulation
#
# `Tensor.register_hook` gets the gradient of *this* backward pass, before it is added to `.grad`.
# Synchronising in the last micro-batch only leaves the earlier ones local.


# %% name="bug-accumulation"
MICRO_BATCHES = 4


def reduce_the_last_micro_batch(model: nn.Module) -> Callable[[], None]:
    calls = dict.fromkeys(model.parameters(), 0)

    def hook_of(parameter: Tensor) -> Callable[[Tensor], Tensor]:
        def hook(gradient: Tensor) -> Tensor:
            calls[parameter] += 1
            if calls[parameter] < MICRO_BATCHES:
                return gradient
            mean = gradient / dist.get_world_size()
            dist.all_reduce(mean)
            return mean

        return hook

    for parameter in model.parameters():
        parameter.register_hook(hook_of(parameter))
    return nothing


accumulated = miniddp.run_ranks(step_with, 2, reduce_the_last_micro_batch, MICRO_BATCHES)
assert all(set(origins) == {"neither of the two"} for origins in accumulated)
assert all("different" in text for text in accumulated.outputs)
show_ranks(accumulated)


# %% name="fix-accumulation"
def reduce_what_has_accumulated(model: nn.Module) -> Callable[[], None]:
    calls = dict.fromkeys(model.parameters(), 0)

    def hook(parameter: Tensor) -> None:
        calls[parameter] += 1
        if calls[parameter] == MICRO_BATCHES:
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    return nothing


all_of_it = miniddp.run_ranks(step_with, 2, reduce_what_has_accumulated, MICRO_BATCHES)
assert all(set(origins) == {"mean of the ranks"} for origins in all_of_it)
assert all("identical" in text for text in all_of_it.outputs)
show_ranks(all_of_it)

# %% [markdown]
# ### A bucket in the wrong order
#
# Four parameters share a bucket. The hook of the one that comes last in the model sends it.
# Backward runs from the last layer to the first, so the other three have no gradient yet.


# %% name="bug-order"
BUCKET = 4
record(bucket=BUCKET)


def average(parameters: Sequence[Tensor]) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)


def cut(parameters: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    return [parameters[start : start + BUCKET] for start in range(0, len(parameters), BUCKET)]


def send_with_the_last_parameter(model: nn.Module) -> Callable[[], None]:
    for bucket in cut(list(model.parameters())):

        def hook(_: Tensor, bucket: Sequence[Tensor] = bucket) -> None:
            average(bucket)

        bucket[-1].register_post_accumulate_grad_hook(hook)
    return nothing


wrong_order = miniddp.run_ranks(step_with, 2, send_with_the_last_parameter, 1)
synchronised = [origin == "mean of the ranks" for origin in wrong_order[0]]
assert synchronised == [False, False, False, True, False, True]
assert all("different" in text for text in wrong_order.outputs)
show_ranks(wrong_order)


# %% name="fix-order"
def send_when_all_are_ready(model: nn.Module) -> Callable[[], None]:
    for bucket in cut(list(model.parameters())[::-1]):
        send_when_complete(bucket)
    return nothing


def send_when_complete(bucket: Sequence[Tensor]) -> None:
    missing = set(bucket)

    def hook(parameter: Tensor) -> None:
        missing.remove(parameter)
        if not missing:
            average(bucket)
            missing.update(bucket)

    for parameter in bucket:
        parameter.register_post_accumulate_grad_hook(hook)


right_order = miniddp.run_ranks(step_with, 2, send_when_all_are_ready, 1)
assert all(set(origins) == {"mean of the ranks"} for origins in right_order)
assert all("identical" in text for text in right_order.outputs)
show_ranks(right_order)

# %% [markdown]
# ### A bucket that is never full
#
# Gradients wait until four of them are there. The last two of a backward pass never fill a bucket:
# those of the *first* layer.


# %% name="bug-never-full"
def send_full_buckets(model: nn.Module) -> Callable[[], None]:
    waiting: list[Tensor] = []

    def hook(parameter: Tensor) -> None:
        waiting.append(parameter)
        if len(waiting) == BUCKET:
            average(waiting)
            waiting.clear()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    return nothing


never_full = miniddp.run_ranks(step_with, 2, send_full_buckets, 1)
assert all(origins[:2] == ["own gradient"] * 2 for origins in never_full)
assert all(set(origins[2:]) == {"mean of the ranks"} for origins in never_full)
show_ranks(never_full)


# %% name="never-full-steps"
def train_with_full_buckets(rank: int, steps: int) -> list[int]:
    """Counts, for each step, the parameters whose gradients differ between the ranks."""
    model = small_model()
    send_full_buckets(model)
    torch.manual_seed(100 + rank)
    different = []
    for step in range(steps):
        backward(model, [torch.randn(4, 8, device=device())])
        everyone: list = [None] * dist.get_world_size()
        dist.all_gather_object(
            everyone, [parameter.grad.tolist() for parameter in model.parameters()]
        )
        names = [name for name, _ in model.named_parameters()]
        odd = [name for name, *grads in zip(names, *everyone, strict=True) if grads[0] != grads[1]]
        print(f"step {step}, own:", " ".join(odd) or "none")
        different.append(len(odd))
        model.zero_grad()
    return different


different = miniddp.run_ranks(train_with_full_buckets, 2, 4)
assert different[0] == different[1] == [2, 0, 2, 0]
print(different.outputs[0], end="")
