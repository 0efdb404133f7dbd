# %% [markdown]
# # Synchronise gradients
#
# Ranks that train on different data drift apart. This run measures the drift on real sentence
# pairs, stops it with one all-reduce per parameter, compares the result with a single process,
# and shows three broken ways to synchronise.

# %% name="setup"
from collections.abc import Callable

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor, nn

import miniddp
from book import data_dir, figure, provenance, record, show_ranks, table
from miniddp.data import collate, encode, load_mrpc
from miniddp.model import load_model, load_tokenizer
from miniddp.process import device

WORLD_SIZES = [2, 4]
PAIRS_PER_RANK = 8
provenance(device=device(), world_size=WORLD_SIZES, backend="gloo")
pairs = load_mrpc(data_dir())
rows = pairs[:]
tokenizer = load_tokenizer(rows["sentence1"] + rows["sentence2"], "tiny", pretrained=False)
encoded = encode(pairs.select(range(512)), tokenizer, max_length=128)

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
axes.plot(drifted, marker="o", label="without synchronisation")
axes.plot(synchronised, marker="s", label="with sync_gradients()")
axes.set(xlabel="step", ylabel="largest difference of a weight")
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
    before = gradient.flatten()[:4].tolist()
    ddp.sync_gradients()
    after = gradient.flatten()[:4].tolist()
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
# ## The mean is the gradient of the joined batch
#
# One process takes the pairs of all ranks as one batch. Its gradient is compared, parameter by
# parameter, with the synchronised gradient of each rank.


# %% name="joined"
def compare(rank: int, world_size: int) -> tuple[float, float, str]:
    batch = joined_batch(0, world_size)
    ddp, single = miniddp.SimpleDDP(build()), build()
    ddp(**own_part(batch, rank, world_size)).loss.backward()
    single(**batch).loss.backward()
    unsynchronised = largest_gradient_difference(ddp.module, single)
    ddp.sync_gradients()
    return unsynchronised, largest_gradient_difference(ddp.module, single)


def largest_gradient_difference(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max((x.grad - y.grad).abs().max().item() for x, y in pairs)


rows = []
for world_size in WORLD_SIZES:
    differences = miniddp.run_ranks(compare, world_size, world_size)
    before = max(unsynchronised for unsynchronised, _ in differences)
    after = max(synchronised for _, synchronised in differences)
    assert before > 1e-2
    assert after < 1e-5, "only rounding may remain"
    rows.append([world_size, world_size * PAIRS_PER_RANK, f"{before:.1e}", f"{after:.1e}"])
    record(**{f"joined_before_{world_size}": before, f"joined_after_{world_size}": after})
table(rows, ["ranks", "joined batch", "difference before sync", "difference after sync"])

# %% [markdown]
# ## Three ways to get it wrong
#
# Each of these runs without an error. `verify_replicas` finds what it did.


# %% name="harness"
def small_model() -> nn.Module:
    miniddp.set_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def step_with(
    rank: int,
    world_size: int,
    synchronise: Callable[[nn.Module], Callable[[], None]],
    micro_batches: int,
) -> str:
    """Train one step with someone's synchronisation; say what became of the replicas."""
    model = small_model()
    finish = synchronise(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(100 + rank)
    for _ in range(micro_batches):
        loss = model(torch.randn(4, 8)).square().mean() / micro_batches
        loss.backward()
    finish()
    optimizer.step()
    try:
        miniddp.replicate.verify_replicas(model)
        print("the replicas are identical")
        return ""
    except ValueError as error:
        print(f"ValueError: {error}")
        return str(error)


def nothing() -> None:
    pass


# %% [markdown]
# ### A hook that reduces the parameter
#
# `register_post_accumulate_grad_hook` calls the hook with the *parameter*. Reducing what the hook
# gets sums the weights and leaves the gradients alone.


# %% name="bug-parameter"
def reduce_the_argument(model: nn.Module) -> Callable[[], None]:
    def hook(parameter: Tensor) -> None:
        dist.all_reduce(parameter.detach())
        parameter.detach().div_(dist.get_world_size())

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    return nothing


wrong_argument = miniddp.run_ranks(step_with, 2, 2, reduce_the_argument, 1)
assert all("replicas differ" in message for message in wrong_argument)
show_ranks(wrong_argument)


# %% name="fix-parameter"
def reduce_the_gradient(model: nn.Module) -> Callable[[], None]:
    def hook(parameter: Tensor) -> None:
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(dist.get_world_size())

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    return nothing


assert not any(miniddp.run_ranks(step_with, 2, 2, reduce_the_gradient, 1))

# %% [markdown]
# ### `register_hook` under accumulation
#
# `Tensor.register_hook` gets the gradient of *this* backward pass, before it is added to `.grad`.
# Synchronising in the last micro-batch only leaves the earlier ones local.


# %% name="bug-accumulation"
def reduce_the_last_micro_batch(model: nn.Module) -> Callable[[], None]:
    calls = dict.fromkeys(model.parameters(), 0)

    def hook_of(parameter: Tensor) -> Callable[[Tensor], Tensor]:
        def hook(gradient: Tensor) -> Tensor:
            calls[parameter] += 1
            if calls[parameter] < 4:
                return gradient
            reduced = gradient.clone()
            dist.all_reduce(reduced)
            return reduced / dist.get_world_size()

        return hook

    for parameter in model.parameters():
        parameter.register_hook(hook_of(parameter))
    return nothing


accumulated = miniddp.run_ranks(step_with, 2, 2, reduce_the_last_micro_batch, 4)
assert all("replicas differ" in message for message in accumulated)
show_ranks(accumulated)

# %% [markdown]
# ### A bucket that is never full
#
# Gradients are collected and sent when a bucket is full. The last bucket of a backward pass rarely
# is. If nobody sends it, the parameters that became ready last stay local: those of the *first*
# layer, because backward runs from the last layer to the first.


# %% name="bug-bucket"
def send_full_buckets(model: nn.Module, send_the_rest: bool = False) -> Callable[[], None]:
    waiting: list[Tensor] = []

    def send() -> None:
        for parameter in waiting:
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())
        waiting.clear()

    def hook(parameter: Tensor) -> None:
        waiting.append(parameter)
        if len(waiting) == 4:
            send()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    return send if send_the_rest else nothing


left_over = miniddp.run_ranks(step_with, 2, 2, send_full_buckets, 1)
assert all("'0.weight'" in message for message in left_over)
show_ranks(left_over)


# %% name="fix-bucket"
def send_every_bucket(model: nn.Module) -> Callable[[], None]:
    return send_full_buckets(model, send_the_rest=True)


assert not any(miniddp.run_ranks(step_with, 2, 2, send_every_bucket, 1))
