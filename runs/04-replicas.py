# %% [markdown]
# # Replicas
#
# Data parallel training keeps one copy of the model per rank. This run trains copies that start
# equal and copies that do not, builds them with equal and with different seeds, lets `SimpleDDP`
# compare them, and repairs the ones that differ.

# %% name="setup"
import pickle
import re
import textwrap
import time
import warnings
from collections.abc import Callable

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch.nn import functional

import miniddp
from book import figure, provenance, record, show_ranks, table
from miniddp.model import load_model
from miniddp.process import device
from miniddp.replicate import _fingerprints, broadcast_module, verify_replicas

WORLD_SIZES = [2, 4]
provenance(device=device(), world_size=WORLD_SIZES, backend="gloo")

# %% [markdown]
# ## Copies that start different stay different
#
# Two ranks learn the same line, each from 64 points of its own. They average their gradients in
# every step. The only change between the two experiments is the seed of rank 1's first weights.


# %% name="different-start"
def train(rank: int, seeds: list[int], steps: int) -> tuple[list[float], list[float], list[float]]:
    """Per step: the loss, the largest difference from rank 0's weights, the mean gradient."""
    torch.manual_seed(7)
    truth = torch.randn(8, 1)
    torch.manual_seed(100 + rank)
    points = torch.randn(64, 8)
    torch.manual_seed(seeds[rank])
    model = torch.nn.Linear(8, 1, bias=False)
    losses, gaps, gradients = [], [], []
    for _ in range(steps):
        loss = functional.mse_loss(model(points), points @ truth)
        gradient = torch.autograd.grad(loss, model.weight)[0]
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
        of_rank_0 = model.weight.detach().clone()
        dist.broadcast(of_rank_0, src=0)
        losses.append(loss.item())
        gaps.append((model.weight - of_rank_0).abs().max().item())
        gradients.append(gradient.norm().item())
        with torch.no_grad():
            model.weight -= 0.1 * gradient
    return losses, gaps, gradients


STEPS = 50
equal = miniddp.run_ranks(train, 2, [42, 42], STEPS)
different = miniddp.run_ranks(train, 2, [42, 43], STEPS)
(_, gaps, gradients) = different[1]
assert all(gap == 0 for _, equal_gaps, _ in equal for gap in equal_gaps)
assert all(losses[-1] < 1e-4 for losses, _, _ in equal)
assert all(losses[-1] > 0.01 for losses, _, _ in different)
assert max(gaps) - min(gaps) < 1e-6, "the difference is only changed by rounding"
assert gradients[-1] < 1e-2 * gradients[0]

fig, axes = plt.subplots()
for rank, dash in enumerate(["-", (0, (7, 4))]):
    color = f"C{rank}"
    axes.semilogy(different[rank][0], color=color, linestyle=dash)
    axes.semilogy(equal[rank][0], color=color, linestyle=dash, label=f"rank {rank}")
axes.text(30, 0.5, "different start")
axes.text(24, 1e-2, "equal start")
axes.set(xlabel="step", ylabel="loss of the rank's own copy")
axes.legend()
figure(fig)

# %% name="different-start-values"
record(
    first_gap=gaps[0],
    last_gap=gaps[-1],
    first_mean_gradient=gradients[0],
    last_mean_gradient=gradients[-1],
    equal_loss=max(losses[-1] for losses, _, _ in equal),
    different_loss_0=different[0][0][-1],
    different_loss_1=different[1][0][-1],
    start_steps=STEPS,
)

# %% [markdown]
# ## The same seed on every rank
#
# Every rank builds the model by itself. Nothing is sent. The seed alone makes the weights equal.


# %% name="same-seed"
def build(seed: int) -> torch.nn.Module:
    miniddp.set_seed(seed)
    return load_model("tiny", pretrained=False).to(device())


def first_weights(model: torch.nn.Module) -> str:
    return numbers(next(model.parameters()).flatten()[:4])


def numbers(values: torch.Tensor) -> str:
    return " ".join(f"{value:+.4f}" for value in values.tolist())


def say(text: object) -> None:
    """Print in lines that are short enough for ranks side by side."""
    print(textwrap.fill(str(text), width=33, subsequent_indent="  "))


def wrap_with_one_seed(rank: int) -> int:
    model = build(seed=42)
    print("first weights:", first_weights(model), sep="\n")
    ddp = miniddp.SimpleDDP(model)
    print("SimpleDDP raises no error")
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
    print("first weights:", first_weights(model), sep="\n")
    try:
        miniddp.SimpleDDP(model)
    except ValueError as error:
        say(f"ValueError: {error}")
        return str(error)
    return ""


messages = miniddp.run_ranks(wrap_with_two_seeds, 2)
assert len(set(messages)) == 1, "every rank must see the same error"
assert "replicas differ" in messages[0]
show_ranks(messages)

# %% name="which-rank"
four = miniddp.run_ranks(lambda rank: wrap_with_two_seeds(0 if rank == 2 else 1), 4)
assert all(message.endswith("on rank 2") for message in four)
say(four[0])

# %% [markdown]
# ## One random number too many
#
# Every rank seeds with 42. Rank 0 then draws one random number before it builds the model, as a
# line does that logs a random sample.


# %% name="one-draw"
def wrap_after_a_draw(rank: int) -> tuple[list[float], str]:
    miniddp.set_seed(42)
    if rank == 0:
        torch.rand(1)
    model = load_model("tiny", pretrained=False).to(device())
    print("first weights:", first_weights(model), sep="\n")
    return next(model.parameters()).flatten()[:4].tolist(), verdict(model)


def verdict(model: torch.nn.Module) -> str:
    try:
        verify_replicas(model)
    except ValueError as error:
        say(f"ValueError: {error}")
        return str(error)
    print("identical")
    return ""


drawn = miniddp.run_ranks(wrap_after_a_draw, 2)
(weights_0, message_0), (weights_1, message_1) = drawn
assert weights_0[:3] == weights_1[1:], "rank 0 is one random number ahead"
assert message_0 == message_1
assert "'model.embed_tokens.weight'" in message_0
show_ranks(drawn)

# %% [markdown]
# ## A check that raises on some ranks only
#
# Rank 0 compares its weights with its own and finds nothing. Rank 1 raises, and a program that
# catches the error lives on. Rank 0 waits in the next broadcast until the run is ended.


# %% name="alone"
def verify_alone(module: torch.nn.Module) -> None:
    for name, parameter in module.named_parameters():
        reference = parameter.detach().clone()
        dist.broadcast(reference, src=0)
        if not torch.equal(parameter, reference):
            raise ValueError(f"parameter {name!r} is not that of rank 0")


def catch_and_live_on(rank: int) -> None:
    torch.manual_seed(42 + rank)
    try:
        verify_alone(torch.nn.Linear(4, 2))
        print("no error")
    except ValueError as error:
        say(f"ValueError: {error}")
        time.sleep(60)


PATIENCE = 8
try:
    miniddp.run_ranks(catch_and_live_on, 2, timeout=PATIENCE)
    raise AssertionError("rank 0 must wait for ever")
except miniddp.launch.RanksTimedOut as error:
    texts, stacks = error.outputs, error.stacks
frames = re.findall(r"line \d+ in (\w+)", stacks[0])
assert "verify_alone" in frames
assert "broadcast" in frames
assert texts[0] == ""
assert "ValueError" in texts[1]
waits = f"no output\nafter {PATIENCE} s still in broadcast,\n  called by verify_alone"
show_ranks([waits, texts[1]])

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
    print(f"before the broadcast: {before:.6f}")
    print(f"after the broadcast:  {after:.6f}")
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
def normalised(rank: int) -> torch.nn.Module:
    """Equal weights on every rank; what is drawn afterwards, the rank's data, is its own."""
    miniddp.set_seed(42)
    model = torch.nn.Sequential(torch.nn.Linear(8, 3), torch.nn.BatchNorm1d(3)).to(device())
    miniddp.set_seed(42, rank_offset=rank)
    return model


def drift(rank: int) -> tuple[float, str]:
    model = normalised(rank)
    verify_replicas(model)
    model(torch.randn(16, 8).to(device()))
    mean = model[1].running_mean
    print("running mean:", numbers(mean), sep="\n")
    try:
        verify_replicas(model)
        message = ""
    except ValueError as error:
        message = str(error)
        say(f"ValueError: {error}")
    broadcast_module(model)
    verify_replicas(model)
    print("after a broadcast: identical")
    return mean[0].item(), message


buffers = miniddp.run_ranks(drift, 2)
assert all("buffer '1.running_mean'" in message for _, message in buffers)
show_ranks(buffers)

# %% [markdown]
# ## torch's DistributedDataParallel copies the buffers
#
# Before each forward pass it broadcasts the buffers of rank 0. What the other ranks had counted
# is overwritten.


# %% name="torch-buffers"
def two_forwards(rank: int) -> list[list[float]]:
    model = normalised(rank)
    seen = []
    model[1].register_forward_pre_hook(lambda norm, _: seen.append(norm.running_mean.clone()))
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    for _ in range(2):
        ddp(torch.randn(16, 8).to(device()))
        seen.append(model[1].running_mean.clone())
    for moment, mean in zip(
        ["before 1:", "after 1: ", "before 2:", "after 2: "], seen, strict=True
    ):
        print(moment, numbers(mean))
    return [mean.tolist() for mean in seen]


means = miniddp.run_ranks(two_forwards, 2)
(_, after_0, second_0, _), (_, after_1, second_1, _) = means
assert after_0 != after_1
assert second_0 == second_1 == after_0, "the second forward starts from rank 0's buffers"
show_ranks(means)


# %% name="deprecated"
def warn(rank: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.nn.parallel.DistributedDataParallel(
            torch.nn.Linear(2, 2).to(device()), broadcast_buffers=True
        )
    return [f"{w.category.__name__}: {w.message}" for w in caught if "buffers" in str(w.message)]


told = miniddp.run_ranks(warn, 1)[0]
for text in told or ["no warning"]:
    say(". ".join(text.split(". ")[:2]))

# %% [markdown]
# ## A seed per rank for dropout
#
# After the model is built, every rank draws the same random numbers: the same dropout masks. A
# second call of `set_seed`, with the rank as offset, gives each rank masks of its own.


# %% name="dropout"
def masks(rank: int) -> tuple[list[int], list[int]]:
    build(seed=42)
    same = draw_mask()
    miniddp.set_seed(42, rank_offset=rank)
    own = draw_mask()
    print("alike: ", *same)
    print("offset:", *own)
    return same, own


def draw_mask() -> list[int]:
    return functional.dropout(torch.ones(12, device=device()), p=0.5).int().tolist()


drawn_masks = miniddp.run_ranks(masks, 2)
(same_0, own_0), (same_1, own_1) = drawn_masks
assert same_0 == same_1
assert own_0 != own_1
show_ranks(drawn_masks)

# %% [markdown]
# ## The parameters that `model.model` leaves out
#
# A classifier of transformers holds the transformer in its attribute `model` and the
# classification head beside it.

# %% name="left-out"
classifier = build(seed=42)
everything = dict(classifier.named_parameters())
inside = {id(parameter) for parameter in classifier.model.parameters()}
left_out = {name: p for name, p in everything.items() if id(p) not in inside}
assert list(left_out) == ["score.weight"]
print(f"model:       {len(everything)} tensors")
print(f"model.model: {len(inside)} tensors")
for name, parameter in left_out.items():
    print(f"left out:    {name}")
    print(f"  {tuple(parameter.shape)}, {parameter.numel()} numbers")


# %% name="head"
def compare_two_ways(rank: int) -> tuple[str, str]:
    model = build(seed=42)
    torch.manual_seed(rank)
    torch.nn.init.normal_(model.score.weight, std=0.02)  # a new head, seeded by rank
    print("model.model:")
    part = verdict(model.model)
    print("model:")
    return part, verdict(model)


verdicts = miniddp.run_ranks(compare_two_ways, 2)
assert all(part == "" for part, _ in verdicts)
assert all("'score.weight'" in whole for _, whole in verdicts)
show_ranks(verdicts)

# %% name="frozen-head"
optimizer = torch.optim.SGD(classifier.model.parameters(), lr=1e-2)
start = classifier.score.weight.detach().clone()
body_start = classifier.model.norm.weight.detach().clone()
tokens = torch.arange(3, 67, device=device()).reshape(8, 8)
norms = []
for _ in range(3):
    classifier(input_ids=tokens, labels=torch.arange(8, device=device()) % 2).loss.backward()
    norms.append(classifier.score.weight.grad.norm().item())
    optimizer.step()
    optimizer.zero_grad()
head_moved = (classifier.score.weight - start).abs().max().item()
assert head_moved == 0
assert not torch.equal(classifier.model.norm.weight, body_start)
assert classifier.score.weight.grad is not None, "zero_grad() does not reach the head"
assert norms[0] < norms[1] < norms[2], "its gradient adds up from step to step"
record(
    head_tensors=len(left_out),
    head_numbers=sum(parameter.numel() for parameter in left_out.values()),
    head_moved=head_moved,
    head_gradient_first=norms[0],
    head_gradient_third=norms[2],
)

# %% [markdown]
# ## What the comparison costs
#
# `verify_replicas` sends a digest of every tensor, not the tensors. Its time is set by reading the
# weights once, so it grows with the model, but the bytes on the wire grow only with the number of
# tensors. The naive way broadcasts every tensor. Times are the fastest of five, on one machine,
# where a message is a copy in memory.


# %% name="cost"
def cost(rank: int, size: str) -> tuple[int, int, int, float, float]:
    model = load_model(size, pretrained=False).to(device())
    broadcast_module(model)
    times: dict[Callable[[torch.nn.Module], None], list[float]] = {
        verify_replicas: [],
        verify_alone: [],
    }
    for _ in range(5):
        for verify, seconds in times.items():
            dist.barrier()
            start = time.perf_counter()
            verify(model)
            seconds.append(time.perf_counter() - start)
    digests = list(_fingerprints(model, values=True))
    num_bytes = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    return len(digests), num_bytes, len(pickle.dumps(digests)), *map(min, times.values())


rows, costs = [], {}
for size in ("tiny", "5m", "25m"):
    costs[size] = miniddp.run_ranks(cost, 2, size, timeout=120)[0]
    tensors, num_bytes, digest_bytes, by_digest, by_tensor = costs[size]
    rows.append(
        [
            size,
            tensors,
            f"{num_bytes / 1e6:.1f}",
            f"{digest_bytes / 1e6:.3f}",
            f"{by_tensor * 1e3:.0f}",
            f"{by_digest * 1e3:.0f}",
        ]
    )
    assert digest_bytes < num_bytes / 100
table(
    rows,
    ["model", "tensors", "MB, tensors", "MB, digests", "ms, tensors", "ms, digests"],
)
record(
    largest_mb=costs["25m"][1] / 1e6,
    largest_digests_kb=costs["25m"][2] / 1e3,
    smallest_saving=min(num_bytes / digests for _, num_bytes, digests, _, _ in costs.values()),
    largest_saving=max(num_bytes / digests for _, num_bytes, digests, _, _ in costs.values()),
)
