# %% [markdown]
# # Replicas
#
# Data parallel training keeps one copy of the model per rank. This run trains copies that start
# equal and copies that do not, makes them equal by a broadcast and by seeds, compares them, and
# looks at what differs all the same: dropout masks and buffers.

# %% name="setup"
import pickle
import textwrap
import time
import warnings
from unittest import mock

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist

import miniddp
from book import MUTED, figure, provenance, record, show_ranks, table
from finetune.model import load_model
from instruments.drift import MOMENTS, VALUES, draw_in_four_ways, running_means, train_from
from instruments.failures import failure_of, functions_of, hang_of, last_line
from instruments.programs import held_out_loss, run_edited_stage, step_losses
from miniddp.process import device
from miniddp.replicate import verify_replicas

provenance(device=device(), world_size=2, backend="gloo")


def fill(text: str) -> str:
    """In lines that are short enough for two ranks beside each other."""
    return textwrap.fill(text, width=33, subsequent_indent="  ")


def numbers(values: list[float]) -> str:
    return " ".join(f"{value:+.4f}" for value in values)


# %% [markdown]
# ## Stage 3 without its seed
#
# The program of the chapter before, as it is, and with one line changed: each rank seeds with its
# rank before it builds the model.


# %% name="unseeded"
def losses_of(file: str, old: str, new: str) -> dict[str, float]:
    """What a stage prints in its first 60 steps, with `new` for its line `old`."""
    call = (run_edited_stage, 2, file, old, new, 60)
    printed = miniddp.run_ranks(*call, timeout=300).outputs[0]
    losses = {f"step {step}": loss for step, loss in step_losses(printed).items()}
    return {**losses, "held-out": held_out_loss(printed)}


def show_losses(named: dict[str, dict[str, float]]) -> None:
    moments = next(iter(named.values()))
    rows = [[moment, *(f"{losses[moment]:.4f}" for losses in named.values())] for moment in moments]
    table(rows, ["loss", *named])


SEED = "torch.manual_seed(0)"
seeded = losses_of("3_sharding.py", SEED, SEED)
unseeded = losses_of("3_sharding.py", SEED, "torch.manual_seed(dist.get_rank())")
assert seeded != unseeded
assert seeded["held-out"] < unseeded["held-out"] < 6, "it learns, but less"
show_losses({"seed 0": seeded, "a seed per rank": unseeded})

# %% [markdown]
# ## Copies that start different stay different
#
# Two ranks learn the same line, each from 64 points of its own. They average their gradients in
# every step. The only change between the two experiments is the seed of rank 1's first weights.

# %% name="different-start"
STEPS = 50
equal = miniddp.run_ranks(train_from, 2, [42, 42], STEPS)
different = miniddp.run_ranks(train_from, 2, [42, 43], STEPS)
assert all(step.gap == 0 for steps in equal for step in steps)
gaps = [step.gap for step in different[1]]
assert max(gaps) - min(gaps) < 1e-6, "the difference is only changed by rounding"
assert all(steps[-1].loss > 0.01 for steps in different)
assert different[0][-1].mean_gradient < 1e-2 * different[0][0].mean_gradient

fig, axes = plt.subplots()
for rank, dash in enumerate(["-", (0, (7, 4))]):
    look = {"color": f"C{rank}", "linestyle": dash}
    axes.semilogy([step.loss for step in different[rank]], **look)
    axes.semilogy([step.loss for step in equal[rank]], **look, label=f"rank {rank}")
axes.text(30, 0.5, "different start")
axes.text(24, 1e-2, "equal start")
axes.set(xlabel="step", ylabel="loss of the rank's own copy")
axes.legend()
figure(fig)

# %% name="different-start-values"
equal_loss = max(steps[-1].loss for steps in equal)
assert equal_loss < 1e-4
record(
    equal_loss=equal_loss,
    different_loss_0=different[0][-1].loss,
    different_loss_1=different[1][-1].loss,
    start_steps=STEPS,
)

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
    first = next(model.parameters()).flatten()[:4].tolist()
    print("first weights:", numbers(first), sep="\n")
    return first


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
        print(fill(f"ValueError: {error}"))
        time.sleep(60)


PATIENCE = 8
hang = hang_of(catch_and_live_on, 2, timeout=PATIENCE)
assert {"verify_alone", "broadcast"} <= set(functions_of(hang.stacks[0]))
assert hang.outputs[0] == ""
assert "ValueError" in hang.outputs[1]
waits = f"no output\nafter {PATIENCE} s still in broadcast,\n  called by verify_alone"
show_ranks([waits, hang.outputs[1]])

# %% [markdown]
# ## Buffers are part of the replica
#
# Batch normalisation keeps a running mean in a *buffer*: a tensor that is saved with the model but
# that the optimizer does not train. Every rank sees other data, so a forward pass makes the buffers
# differ, although every parameter is still the same. Before most forward passes torch's
# DistributedDataParallel broadcasts the buffers of rank 0. What the others had counted is
# overwritten.

# %% name="torch-buffers"
means = miniddp.run_ranks(running_means, 2)
(_, after_0, second_0, _), (_, after_1, second_1, _) = means
assert after_0 != after_1
assert second_0 == second_1 == after_0, "the second forward starts from rank 0's buffers"
show_ranks(
    "\n".join(
        f"{moment + ':':9} {numbers(mean)}" for moment, mean in zip(MOMENTS, of_rank, strict=True)
    )
    for of_rank in means
)


# %% name="deprecated"
def warn(rank: int) -> list[str]:
    layer = torch.nn.Linear(2, 2).to(device())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.nn.parallel.DistributedDataParallel(layer, broadcast_buffers=True)
    return [f"{w.category.__name__}: {w.message}" for w in caught if "buffers" in str(w.message)]


told = miniddp.run_ranks(warn, 1)[0]
for text in told or ["no warning"]:
    print(fill(". ".join(text.split(". ")[:2])))

# %% [markdown]
# ## Equal weights, and dropout masks of one's own
#
# Four ways to seed two ranks. Each draws the weights of a layer, and then a dropout mask.

# %% name="seeds"
ways = miniddp.run_ranks(draw_in_four_ways, 2)
fig, axes = plt.subplots(figsize=(3.9, 4.4))
verdicts = []
for number, name in enumerate(ways[0]):
    first, second = ways[0][name], ways[1][name]
    if first.kept == second.kept:
        verdicts.append("✗ equal masks")
    elif first.weight != second.weight:
        verdicts.append("✗ unequal weights")
    else:
        verdicts.append("✓")
    top = 4 * number
    axes.text(-5.8, top, f"{'ABCD'[number]}  {name}", va="center")
    axes.text(VALUES, top, verdicts[-1], va="center", ha="right")
    for rank, drawn in enumerate((first, second)):
        row = top + 1.1 + rank
        color = f"C{rank}"
        axes.text(-5.8, row, f"rank {rank}", va="center", color=color)
        axes.text(-0.6, row, f"{drawn.weight:+.2f}", va="center", ha="right")
        for place, keeps in enumerate(drawn.kept):
            face = color if keeps else "none"
            square = plt.Rectangle((place, row - 0.4), 0.8, 0.8, facecolor=face, edgecolor=color)
            axes.add_patch(square)
assert verdicts == ["✗ equal masks", "✗ unequal weights", "✓", "✓"]
axes.text(-0.6, -1.3, "first weight", color=MUTED, ha="right")
axes.text(0, -1.3, "what dropout keeps", color=MUTED, ha="left")
axes.set(xlim=(-5.9, VALUES + 0.2), ylim=(14.8, -2))
axes.axis("off")
figure(fig)

# %% [markdown]
# ## The parameters that `model.model` leaves out
#
# A classifier of transformers holds the transformer in its attribute `model` and the
# classification head beside it.


# %% name="left-out"
def classifier() -> torch.nn.Module:
    miniddp.set_seed(42)
    return load_model("tiny", pretrained=False).to(device())


model = classifier()
inside = {id(parameter) for parameter in model.model.parameters()}
everything = dict(model.named_parameters())
left_out = {name: p for name, p in everything.items() if id(p) not in inside}
assert list(left_out) == ["score.weight"]
print(f"model:       {len(everything)} tensors")
print(f"model.model: {len(inside)} tensors")
for name, parameter in left_out.items():
    print(f"left out:    {name}")
    print(f"  {tuple(parameter.shape)}, {parameter.numel()} numbers")


# %% name="head"
def verdict(module: torch.nn.Module) -> str:
    try:
        verify_replicas(module)
    except ValueError as error:
        return f"ValueError: {error}"
    return "identical"


def compare_two_ways(rank: int) -> tuple[str, str]:
    model = classifier()
    torch.manual_seed(rank)
    torch.nn.init.normal_(model.score.weight, std=0.02)  # a new head, seeded by rank
    of_part, of_all = verdict(model.model), verdict(model)
    print("model.model:", fill(of_part), "model:", fill(of_all), sep="\n")
    return of_part, of_all


verdicts = miniddp.run_ranks(compare_two_ways, 2)
assert all(of_part == "identical" for of_part, _ in verdicts)
assert all("'score.weight'" in of_all for _, of_all in verdicts)
show_ranks(verdicts)

# %% name="frozen-head"
optimizer = torch.optim.SGD(model.model.parameters(), lr=1e-2)
head, body = model.score.weight, model.model.norm.weight
head_start, body_start = head.detach().clone(), body.detach().clone()
tokens = torch.arange(3, 67, device=device()).reshape(8, 8)
for _ in range(3):
    model(input_ids=tokens, labels=torch.arange(8, device=device()) % 2).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
head_moved = (head - head_start).abs().max().item()
assert head_moved == 0
assert not torch.equal(body, body_start)
record(head_moved=head_moved)

# %% [markdown]
# ## What the comparison sends
#
# `verify_replicas` sends a line of text for each tensor, with a digest of its values, in place of
# the tensor.


# %% name="cost"
def values_and_digests(rank: int) -> tuple[int, int]:
    """The bytes of a model, and of what `verify_replicas` sends in place of them."""
    model = load_model("25m", pretrained=False)
    with mock.patch.object(dist, "all_gather_object") as gather:
        verify_replicas(model)
    _, sent = gather.call_args.args
    tensors = [*model.parameters(), *model.buffers()]
    return sum(tensor.nbytes for tensor in tensors), len(pickle.dumps(sent))


of_values, of_digests = miniddp.run_ranks(values_and_digests, 1)[0]
assert of_digests < of_values / 1000
record(largest_mb=of_values / 1e6, largest_digests_kb=of_digests / 1e3)

# %% [markdown]
# ## Stage 4
#
# Its losses beside those of stage 3, and what it says when its broadcast is taken out.

# %% name="stage"
BROADCAST = "    broadcast_module(model)\n"
repaired = losses_of("4_replicas.py", BROADCAST, BROADCAST)
assert repaired == seeded, "rank 0 draws what all ranks drew in stage 3"
show_losses({"stage 3": seeded, "stage 4": repaired})

# %% name="stage-broken"
failure = failure_of(run_edited_stage, 2, "4_replicas.py", BROADCAST, "", 60)
errors = [last_line(failure.tracebacks[rank]) for rank in range(2)]
assert errors[0] == errors[1]
assert "replicas differ" in errors[0], "also on rank 0, which would otherwise go on"
show_ranks(map(fill, errors))
