# %% [markdown]
# # Replicas
#
# Data parallel training keeps one copy of the model per rank. This run trains copies that start
# equal and copies that do not, makes them equal by a broadcast and by seeds, compares them, and
# looks at what differs all the same: dropout masks and buffers.

# %% name="setup"
import os
import pickle
import re
import textwrap
import time
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch.nn import functional

import miniddp
from book import MUTED, figure, provenance, record, show_ranks, table
from finetune.model import load_model
from miniddp.process import device
from miniddp.replicate import _fingerprints, broadcast_module, verify_replicas

WORLD_SIZES = [2, 4]
provenance(device=device(), world_size=WORLD_SIZES, backend="gloo")

# %% [markdown]
# ## Stage 3 without its seed
#
# The program of the chapter before, as it is, and with one line changed: each rank seeds with its
# rank before it builds the model.


# %% name="unseeded"
STAGE_STEPS = 60


def stage(rank: int, file: str, old: str, new: str) -> None:
    """A stage in the group that is there already, with `new` for its line `old`."""
    os.environ["STEPS"] = str(STAGE_STEPS)
    torch.set_num_threads(1)
    source = Path("stages", file).read_text(encoding="utf-8")
    assert source.count(old) == 1
    names = {"__name__": "stage"}
    exec(source.replace(old, new), names)
    names["init_process_group"] = names["destroy_process_group"] = lambda: None
    names["main"]()


def losses_of(file: str, old: str, new: str) -> dict[str, str]:
    said = miniddp.run_ranks(stage, 2, file, old, new, timeout=300).outputs[0]
    return dict(re.findall(r"(step +\d+|held-out) +loss (\S+)", said))


SEED = "torch.manual_seed(0)"
seeded = losses_of("3_sharding.py", SEED, SEED)
unseeded = losses_of("3_sharding.py", SEED, "torch.manual_seed(dist.get_rank())")
held_out, held_out_unseeded = float(seeded["held-out"]), float(unseeded["held-out"])
assert seeded != unseeded
assert held_out < held_out_unseeded < 6, "it learns, but less"
table(
    [[moment, seeded[moment], unseeded[moment]] for moment in seeded],
    ["loss", "seed 0", "a seed per rank"],
)
record(held_out=held_out, held_out_unseeded=held_out_unseeded)

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
# ## A broadcast makes copies equal
#
# Four ranks build the tiny language model from four seeds. A broadcast copies the tensors of rank 0
# to all others.


# %% name="broadcast"
def build(seed: int) -> torch.nn.Module:
    miniddp.set_seed(seed)
    return load_model("tiny", pretrained=False).to(device())


def repair(rank: int) -> tuple[float, float]:
    model, reference = build(seed=rank), build(seed=0)
    before = difference(model, reference)
    broadcast_module(model)
    verify_replicas(model)
    after = difference(model, reference)
    print(f"before: {before:.6f}")
    print(f"after:  {after:.6f}")
    return before, after


def difference(a: torch.nn.Module, b: torch.nn.Module) -> float:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max((x - y).abs().max().item() for x, y in pairs)


repaired = miniddp.run_ranks(repair, 4)
assert repaired[0][0] == 0
assert all(before > 0 for before, _ in repaired[1:])
assert all(after == 0 for _, after in repaired)
show_ranks(repaired)

# %% [markdown]
# ## What the check says
#
# In lines that are short enough for ranks side by side.


# %% name="verdict"
def say(text: object) -> None:
    print(textwrap.fill(str(text), width=33, subsequent_indent="  "))


def verdict(model: torch.nn.Module) -> str:
    try:
        verify_replicas(model)
    except ValueError as error:
        say(f"ValueError: {error}")
        return str(error)
    print("identical")
    return ""


# %% [markdown]
# ## One random number too many
#
# Every rank seeds with 42. Rank 0 then draws one random number before it builds the model, as a
# line does that logs a random sample.


# %% name="one-draw"
def build_after_a_draw(rank: int) -> list[float]:
    miniddp.set_seed(42)
    if rank == 0:
        torch.rand(1)
    model = load_model("tiny", pretrained=False).to(device())
    first = next(model.parameters()).flatten()[:4]
    print("first weights:", numbers(first), sep="\n")
    return first.tolist()


def numbers(values: torch.Tensor) -> str:
    return " ".join(f"{value:+.4f}" for value in values.tolist())


drawn = miniddp.run_ranks(build_after_a_draw, 2)
assert drawn[0][:3] == drawn[1][1:], "rank 0 is one random number ahead"
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
# ## Buffers are part of the replica
#
# Batch normalisation keeps a running mean in a *buffer*: a tensor that is saved with the model but
# that the optimizer does not train. Every rank sees other data, so a forward pass makes the buffers
# differ, although every parameter is still the same. Before each forward pass torch's
# DistributedDataParallel broadcasts the buffers of rank 0. What the others had counted is
# overwritten.


# %% name="torch-buffers"
def normalised(rank: int) -> torch.nn.Module:
    """Equal weights on every rank; what is drawn afterwards, the rank's data, is its own."""
    miniddp.set_seed(42)
    model = torch.nn.Sequential(torch.nn.Linear(8, 3), torch.nn.BatchNorm1d(3)).to(device())
    miniddp.set_seed(42, rank_offset=rank)
    return model


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
# ## Equal weights, and dropout masks of one's own
#
# Four ways to seed two ranks. Each draws the weights of a layer, and then a dropout mask.


# %% name="seeds"
VALUES = 12


def layer() -> torch.nn.Linear:
    return torch.nn.Linear(4, 4).to(device())


def drawn_by(model: torch.nn.Linear) -> tuple[float, list[bool]]:
    """The layer's first weight, and which values a dropout that follows keeps."""
    kept = functional.dropout(torch.ones(VALUES, device=device()), p=0.5).tolist()
    return model.weight[0, 0].item(), [value > 0 for value in kept]


def seed_in_four_ways(rank: int) -> list[tuple[float, list[bool]]]:
    miniddp.set_seed(42)
    same = drawn_by(layer())
    miniddp.set_seed(42, rank_offset=rank)
    own = drawn_by(layer())
    miniddp.set_seed(42)
    model = layer()
    miniddp.set_seed(42, rank_offset=1 + rank)
    same_then_own = drawn_by(model)
    miniddp.set_seed(42, rank_offset=rank)
    model = layer()
    broadcast_module(model)
    return [same, own, same_then_own, drawn_by(model)]


by_rank = miniddp.run_ranks(seed_in_four_ways, 2)
ways = list(zip(*by_rank, strict=True))
equal_weights, equal_masks = ([of_0[part] == of_1[part] for of_0, of_1 in ways] for part in (0, 1))
assert equal_weights == [True, False, True, True]
assert equal_masks == [True, False, False, False]

fig, axes = plt.subplots(figsize=(3.9, 4.4))
names = [
    "A  one seed for all",
    "B  a seed per rank",
    "C  one seed, then a seed per rank",
    "D  a seed per rank, then broadcast",
]
for number, (name, way) in enumerate(zip(names, ways, strict=True)):
    top = 4 * number
    same_weights, same_masks = equal_weights[number], equal_masks[number]
    says = "✗ equal masks" if same_masks else "✓" if same_weights else "✗ unequal weights"
    axes.text(-5.8, top, name, va="center")
    axes.text(VALUES, top, says, va="center", ha="right")
    for rank, (weight, kept) in enumerate(way):
        row = top + 1.1 + rank
        axes.text(-5.8, row, f"rank {rank}", va="center", color=f"C{rank}")
        axes.text(-0.6, row, f"{weight:+.2f}", va="center", ha="right")
        for place, keeps in enumerate(kept):
            corner, face = (place, row - 0.4), f"C{rank}" if keeps else "none"
            axes.add_patch(
                plt.Rectangle(corner, 0.8, 0.8, facecolor=face, edgecolor=f"C{rank}", linewidth=1)
            )
for x, text, side in ((-0.6, "first weight", "right"), (0, "what dropout keeps", "left")):
    axes.text(x, -1.3, text, color=MUTED, ha=side)
axes.set(xlim=(-5.9, VALUES + 0.2), ylim=(14.8, -2))
axes.axis("off")
figure(fig)

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
for _ in range(3):
    classifier(input_ids=tokens, labels=torch.arange(8, device=device()) % 2).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
head_moved = (classifier.score.weight - start).abs().max().item()
assert head_moved == 0
assert not torch.equal(classifier.model.norm.weight, body_start)
record(head_moved=head_moved)

# %% [markdown]
# ## What the comparison sends
#
# `verify_replicas` sends a line of text for each tensor, with a digest of its values, in place of
# the tensor.


# %% name="cost"
rows = {}
for size in ("tiny", "5m", "25m"):
    model = load_model(size, pretrained=False)
    digests = list(_fingerprints(model, values=True))
    num_bytes = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    rows[size] = [len(digests), num_bytes / 1e6, len(pickle.dumps(digests)) / 1e3]
    assert rows[size][2] < 10 * rows[size][1], "less than a hundredth"
table(
    [
        [size, count, f"{megabytes:.1f}", f"{kilobytes:.1f}"]
        for size, (count, megabytes, kilobytes) in rows.items()
    ],
    ["model", "tensors", "MB of values", "kB of digests"],
)
record(largest_mb=rows["25m"][1], largest_digests_kb=rows["25m"][2])

# %% [markdown]
# ## Stage 4
#
# Its losses beside those of stage 3, and what it says when its broadcast is taken out.

# %% name="stage"
BROADCAST = "    broadcast_module(model)\n"
repaired_losses = losses_of("4_replicas.py", BROADCAST, BROADCAST)
assert repaired_losses == seeded, "rank 0 draws what all ranks drew in stage 3"
table(
    [[moment, seeded[moment], repaired_losses[moment]] for moment in seeded],
    ["loss", "stage 3", "stage 4"],
)

# %% name="stage-broken"
try:
    miniddp.run_ranks(stage, 2, "4_replicas.py", BROADCAST, "", timeout=300)
    raise AssertionError("the replicas differ")
except miniddp.launch.RanksFailed as error:
    last_lines = [error.tracebacks[rank].strip().splitlines()[-1] for rank in range(2)]
assert last_lines[0] == last_lines[1]
assert "replicas differ" in last_lines[0], "also on rank 0, which would otherwise go on"
show_ranks([textwrap.fill(line, width=33, subsequent_indent="  ") for line in last_lines])
