# %% [markdown]
# # Sharding the data
#
# Which rank trains on which samples. This run cuts data into shards, shows what waits when they
# are uneven, compares samplers, evaluates exactly and trains with the book's program.

# %% name="setup"
import itertools
import runpy
import textwrap

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import miniddp
from book import FOREGROUND, MUTED, figure, provenance, record, show_ranks, table
from instruments import sharding
from instruments.failures import functions_of, hang_of
from instruments.programs import held_out_loss, run_torchrun, step_losses
from miniddp.launch import RanksTimedOut
from miniddp.process import device
from miniddp.sampler import DistributedSampler, check_equal_steps, shard
from shakespeare import build_language_model, load_text

provenance(device=device(), world_size=[2, 3, 4], backend="gloo")
sequences, held_out = load_text()
SAMPLES = list(range(10))
JOINED = 36  # the batch of the book's program, of all ranks together
record(held_out=len(held_out), joined_batch=JOINED)

# %% [markdown]
# ## One rank has a step more
#
# Ten samples, three ranks, one sample in each step. The last rank takes what is left over. Every
# step ends in an all-reduce.


# %% name="one-epoch" ranks="3"
def last_takes_the_rest(length: int, world_size: int, rank: int) -> range:
    size = length // world_size
    is_last = rank == world_size - 1
    return range(rank * size, length if is_last else (rank + 1) * size)


def say(text: str) -> None:
    """Prints at once, in lines that are short enough for three ranks beside each other."""
    print(textwrap.fill(text, 28, subsequent_indent="  "), flush=True)


def train(rank: int, epochs: int) -> None:
    samples = last_takes_the_rest(len(SAMPLES), dist.get_world_size(), rank)
    for epoch in range(epochs):
        for step, sample in enumerate(samples):
            dist.all_reduce(torch.zeros(1))  # stands for the all-reduce of the gradients
            say(f"epoch {epoch} step {step}: sample {sample}")
    say("done, waits for the others")
    dist.barrier()


def waits_in(stack: str) -> str:
    """The collective that a rank was in when its time was over."""
    return next(name for name in functions_of(stack) if name in ("all_reduce", "barrier"))


TIMEOUT = 10
WAITING = ["barrier", "barrier", "all_reduce"]


def show_hang(hang: RanksTimedOut) -> None:
    assert [waits_in(hang.stacks[rank]) for rank in range(3)] == WAITING
    texts = [f"{text}… in {name}" for text, name in zip(hang.outputs, WAITING, strict=True)]
    show_ranks(texts, str(hang).splitlines()[0])


one_epoch = hang_of(train, 3, 1, timeout=TIMEOUT)
assert "step 3" not in "".join(one_epoch.outputs)
record(timeout=TIMEOUT)
show_hang(one_epoch)

# %% [markdown]
# With a second epoch the ranks do not wait where the mistake is: rank 2's last step of the first
# epoch meets the others' first step of the second one.

# %% name="two-epochs" ranks="3"
two_epochs = hang_of(train, 3, 2, timeout=TIMEOUT)
assert "epoch 0 step 3" in two_epochs.outputs[2]
assert "epoch 1 step 1" in two_epochs.outputs[2]
assert "epoch 1 step 2" not in two_epochs.outputs[2]
show_hang(two_epochs)

# %% [markdown]
# The check before the epoch, on the same split.


# %% name="equal-steps" ranks="3"
def check(rank: int) -> str:
    samples = last_takes_the_rest(len(SAMPLES), dist.get_world_size(), rank)
    try:
        check_equal_steps(len(samples))
    except ValueError as error:
        say(f"ValueError: {error}")
        return str(error)
    return ""


checked = miniddp.run_ranks(check, 3)
assert all("would take [3, 3, 4] steps" in error for error in checked)
show_ranks(checked)

# %% [markdown]
# On the sequences of the book's program, whose batch of 36 the ranks share. An incomplete last
# batch is dropped. Whether the split works depends on the number of ranks. Computed, not run.

# %% name="depends" badge="computed"
rows = []
for world_size in range(2, 9):
    first, last = (
        len(last_takes_the_rest(len(sequences), world_size, rank)) for rank in (0, world_size - 1)
    )
    steps = [length // (JOINED // world_size) for length in (first, last)]
    verdict = "ends" if steps[0] == steps[1] else "hangs"
    rows.append([world_size, f"{first} and {last}", f"{steps[0]} and {steps[1]}", verdict])
assert [row[-1] for row in rows] == ["ends"] * 6 + ["hangs"]
table(rows, ["ranks", "sequences", "batches", "training"], align="rrrl")

# %% [markdown]
# ## Shards
#
# With strided shards, every step joins the batch that one process would take.

# %% name="joined"
RANKS, BATCH = 4, JOINED // 4
strided, steps = sharding.steps_like_one_process(len(sequences), RANKS, BATCH, contiguous=False)
contiguous, _ = sharding.steps_like_one_process(len(sequences), RANKS, BATCH, contiguous=True)
assert (strided, contiguous) == (steps, 0)
record(ranks=RANKS, steps=steps, joined_strided=strided, joined_contiguous=contiguous)

# %% [markdown]
# ## The sampler
#
# torch's and miniddp's, compared for many lengths, numbers of ranks, seeds and epochs.

# %% name="equal-to-torch"
record(compared=sharding.compare_with_torch((1, 2, 9, 10, 64, 101), (1, 2, 3, 4, 8)))

# %% [markdown]
# ### Without it
#
# Two ranks, the same seed, `shuffle=True`: both read the same sequences.


# %% name="without-sampler" ranks="2"
def read_epoch(rank: int, use_sampler: bool) -> list[list[int]]:
    miniddp.set_seed(0)
    indices = range(len(sequences))
    choose = {"sampler": DistributedSampler(indices)} if use_sampler else {"shuffle": True}
    loader = DataLoader(indices, batch_size=4, **choose)
    batches = [batch.tolist() for batch in loader]
    for step, batch in enumerate(batches[:3]):
        print(f"step {step}:", *batch)
    print(f"{len(batches)} steps in the epoch")
    return batches


without = miniddp.run_ranks(read_epoch, 2, False)
assert without[0] == without[1]
show_ranks(without)

# %% name="with-sampler" ranks="2"
with_sampler = miniddp.run_ranks(read_epoch, 2, True)
first, second = (set(itertools.chain(*batches)) for batches in with_sampler)
assert not first & second, "their number is even"
assert len(first | second) == len(sequences)
assert len(with_sampler[0]) <= len(without[0]) / 2 + 1
show_ranks(with_sampler)

# %% [markdown]
# ### Another order in each epoch

# %% name="set-epoch"
plain, moved = DistributedSampler(SAMPLES, 2, rank=0), DistributedSampler(SAMPLES, 2, rank=0)
rows = []
for epoch in range(3):
    moved.set_epoch(epoch)
    rows.append([epoch, " ".join(map(str, plain)), " ".join(map(str, moved))])
assert len({row[1] for row in rows}) == 1
assert len({row[2] for row in rows}) == 3
table(rows, ["epoch", "without set_epoch", "with set_epoch"], align="rll")

# %% [markdown]
# ### Different seeds
#
# Each rank cuts its share out of a shuffle of its own.

# %% name="different-seeds"
rows = []
for world_size in (2, 4, 8):
    samplers = [DistributedSampler(sequences, world_size, r, seed=r) for r in range(world_size)]
    read = itertools.chain(*samplers)
    never, twice = sharding.read_never_and_twice(len(sequences), read)
    expected = (1 - 1 / world_size) ** world_size
    assert abs(never - expected) < 0.05
    assert twice > 0.1
    rows.append([world_size, f"{never:.1%}", f"{twice:.1%}", f"{expected:.1%}"])
table(rows, ["ranks", "read by no rank", "read more than once", "(1 − 1/N)^N"], align="rrrr")

# %% [markdown]
# ## Exact evaluation
#
# A model that has trained a little, on one process. The loss of each held-out sequence is computed
# once.


# %% name="model"
def trained(number_of_steps: int) -> nn.Module:
    miniddp.set_seed(0)
    model = build_language_model().to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for part in sequences.to(device()).split(JOINED)[:number_of_steps]:
        model(input_ids=part, labels=part).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def loss_of(model: nn.Module, sequence: torch.Tensor) -> float:
    one = sequence[None].to(device())
    return model(input_ids=one, labels=one).loss.item()


torch.set_num_threads(1)  # not slowed down by other programs on the machine
model = trained(40)
losses = [loss_of(model, sequence) for sequence in held_out]

# %% [markdown]
# Then three ways to share fifty of the sequences are counted, on 1 to 50 ranks: computed, from
# these losses.

# %% name="padded-loss" badge="computed"
FEW = losses[:50]
exact = sharding.mean(FEW)
NUMBERS = range(1, len(FEW) + 1)
repeated = [sharding.mean_with_repeats(FEW, ranks) for ranks in NUMBERS]
of_means = [sharding.mean_of_means(FEW, ranks) for ranks in NUMBERS]
assert all(sharding.mean_of_sums(FEW, ranks) == exact for ranks in NUMBERS)
assert all(max(abs(loss - exact) for loss in found) > 0.01 for found in (repeated, of_means))

fig, axes = plt.subplots(figsize=(5, 3))
small = {"markersize": 4, "linewidth": 1}
axes.plot(NUMBERS, repeated, "x-", color=FOREGROUND, label="repeated", **small)
axes.plot(NUMBERS, of_means, "o--", color=MUTED, label="mean of the ranks", **small)
axes.axhline(exact, color=FOREGROUND, linewidth=3, label="sums and counts")
axes.set(xlabel="ranks", ylabel="loss of one model")
axes.legend(loc="lower center", bbox_to_anchor=(0.44, 1), ncols=3, columnspacing=1)
figure(fig)

# %% name="padded-values" badge="computed"
record(
    few=len(FEW),
    few_exact=exact,
    few_lowest=min(*repeated, *of_means),
    few_highest=max(*repeated, *of_means),
)

# %% [markdown]
# Four ranks evaluate the model on all of them, with the function of the book's program.


# %% name="exact-evaluation" ranks="4"
def evaluate_on(rank: int) -> int:
    mine = build_language_model().to(device())
    mine.load_state_dict(weights)
    count = len(shard(len(held_out), dist.get_world_size(), rank))
    print(f"reads {count} sequences", flush=True)
    runpy.run_path("stages/3_sharding.py")["evaluate"](mine, held_out)
    return count


weights = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
evaluated = miniddp.run_ranks(evaluate_on, 4)
assert sum(evaluated) == len(held_out)
assert len(set(evaluated)) > 1, "the shards differ in length"
alone = sharding.mean(losses)
assert evaluated.outputs[0].splitlines()[-1] == f"held-out loss {alone:.4f}"
record(alone=alone)
show_ranks(evaluated)

# %% [markdown]
# ## The program of this chapter

# %% name="stage" ranks="2"
printed = run_torchrun(2, "stages/3_sharding.py")
assert held_out_loss(printed) < step_losses(printed)[20] - 0.5
print(printed, end="")
