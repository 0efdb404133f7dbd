# %% [markdown]
# # Sharding the data
#
# Which rank trains on which samples. This run cuts data into shards, shows what waits when they
# are uneven, compares samplers, evaluates exactly and trains with the book's program. Then it takes
# the sentence pairs of MRPC from text to batches, counts what padding costs, lets loader workers
# draw random numbers, goes on in the middle of an epoch, and reads streams.

# %% name="setup"
import itertools
import math
import os
import re
import runpy
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import datasets
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from datasets import Dataset
from datasets import IterableDataset as Stream
from datasets.distributed import split_dataset_by_node
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data import DistributedSampler as TorchSampler

import miniddp
from book import FOREGROUND, MUTED, data_dir, figure, provenance, record, show_ranks, table
from finetune.data import build_loader, collate, encode, load_mrpc
from finetune.model import load_tokenizer
from finetune.options import Options
from miniddp.launch import RanksTimedOut
from miniddp.process import device
from miniddp.sampler import (
    DistributedSampler,
    check_equal_steps,
    epoch_order,
    shard,
)
from shakespeare import build_language_model, load_text

provenance(device=device(), world_size=[2, 3, 4], backend="gloo")
sequences, held_out = load_text()
pairs = load_mrpc(data_dir())
test_pairs = load_mrpc(data_dir(), "test")
SAMPLES = list(range(10))
JOINED = 36  # the batch of the book's program, of all ranks together
record(sequences=len(sequences), held_out=len(held_out))


def say(text: str) -> None:
    """Prints at once, in lines that are short enough for three ranks beside each other."""
    print(textwrap.fill(text, 28, subsequent_indent="  "), flush=True)


def spaced(indices: Iterable[int]) -> str:
    return " ".join(map(str, indices))


def every_rank(world_size: int, indices_of: Callable[[int], Iterable[int]]) -> list[int]:
    """The indices of all ranks, one rank after the other."""
    return [index for rank in range(world_size) for index in indices_of(rank)]


print(f"{len(pairs)} training pairs, {len(test_pairs)} test pairs")

# %% [markdown]
# ## One rank has a step more
#
# Ten samples, three ranks, one sample in each step. The last rank takes what is left over. Every
# step ends in an all-reduce.


# %% name="split"
def last_takes_the_rest(length: int, world_size: int, rank: int) -> range:
    size = length // world_size
    is_last = rank == world_size - 1
    return range(rank * size, length if is_last else (rank + 1) * size)


for rank in range(3):
    print(f"rank {rank}: {spaced(last_takes_the_rest(10, 3, rank))}")

# %% name="train"
Split = Callable[[int, int, int], range]


def train(rank: int, split: Split, epochs: int, check: bool) -> list[tuple[int, ...]]:
    """Returns, for each of this rank's steps, the samples that rank 0, 1, … brought to it."""
    world_size = dist.get_world_size()
    samples = split(len(SAMPLES), world_size, rank)
    if check:
        check_equal_steps(len(samples))
    met = []
    for epoch in range(epochs):
        for step, sample in enumerate(samples):
            brought = torch.zeros(world_size, dtype=torch.int64)
            brought[rank] = 100 * epoch + sample
            dist.all_reduce(brought)  # stands for the all-reduce of the gradients
            met.append(tuple(brought.tolist()))
            say(f"epoch {epoch} step {step}: sample {sample}")
    say("done, waits for the others")
    dist.barrier()
    return met


# %% name="one-epoch"
def where(stack: str) -> str:
    """The collective that a rank was in when its time was over."""
    return re.findall(r" in (all_reduce|barrier)\b", stack)[0]


TIMEOUT = 10


def stuck(fn: Callable, world_size: int, *arguments: object) -> RanksTimedOut:
    try:
        miniddp.run_ranks(fn, world_size, *arguments, timeout=TIMEOUT)
    except RanksTimedOut as error:
        return error
    raise AssertionError("no rank waited")


def show_stuck(error: RanksTimedOut) -> None:
    show_ranks(
        [f"{output}… in {where(error.stacks[rank])}" for rank, output in enumerate(error.outputs)],
        str(error).splitlines()[0],
    )


one_epoch = stuck(train, 3, last_takes_the_rest, 1, False)
assert [where(one_epoch.stacks[rank]) for rank in range(3)] == ["barrier", "barrier", "all_reduce"]
assert "step 3" not in "".join(one_epoch.outputs)
record(timeout=TIMEOUT)
show_stuck(one_epoch)

# %% [markdown]
# With a second epoch the ranks do not wait where the mistake is: rank 2's last step of the first
# epoch meets the others' first step of the second one.

# %% name="two-epochs"
two_epochs = stuck(train, 3, last_takes_the_rest, 2, False)
assert [where(two_epochs.stacks[rank]) for rank in range(3)] == ["barrier", "barrier", "all_reduce"]
assert "epoch 0 step 3" in two_epochs.outputs[2]
assert "epoch 1 step 1" in two_epochs.outputs[2]
assert "epoch 1 step 2" not in two_epochs.outputs[2]
show_stuck(two_epochs)


# %% [markdown]
# The check before the epoch, on the same split.


# %% name="equal-steps"
def train_checked(rank: int) -> str:
    try:
        train(rank, last_takes_the_rest, 1, True)
    except ValueError as error:
        say(f"ValueError: {error}")
        return str(error)
    return ""


checked = miniddp.run_ranks(train_checked, 3)
assert all("would take [3, 3, 4] steps" in error for error in checked)
show_ranks(checked)

# %% [markdown]
# On the sequences of the book's program, whose batch of 36 the ranks share. An incomplete last
# batch is dropped. Whether the split works depends on the number of ranks.

# %% name="depends"
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
WORLD_SIZE, BATCH = 4, JOINED // 4
steps = len(sequences) // JOINED


def in_step(positions: Sequence[int], step: int) -> Sequence[int]:
    return positions[step * BATCH : (step + 1) * BATCH]


agreeing = {}
for contiguous in (False, True):
    shards = [shard(len(sequences), WORLD_SIZE, rank, contiguous) for rank in range(WORLD_SIZE)]
    agreeing[contiguous] = sum(
        sorted(position for positions in shards for position in in_step(positions, step))
        == list(range(step * JOINED, (step + 1) * JOINED))
        for step in range(steps)
    )
assert agreeing == {False: steps, True: 0}
record(
    ranks=WORLD_SIZE,
    batch=BATCH,
    joined_batch=JOINED,
    steps=steps,
    joined_strided=agreeing[False],
    joined_contiguous=agreeing[True],
)

# %% [markdown]
# ## The sampler
#
# torch's and miniddp's, compared for many lengths, numbers of ranks, seeds and epochs.

# %% name="equal-to-torch"
compared = indices_compared = 0
for length, world_size, shuffle, drop_last in itertools.product(
    (1, 2, 9, 10, 64, 101), (1, 2, 3, 4, 8), (False, True), (False, True)
):
    if drop_last and length < world_size:
        continue  # an empty shard: see below
    for rank, seed, epoch in itertools.product(range(world_size), (0, 7), (0, 1, 2)):
        options = (range(length), world_size, rank, shuffle, seed, drop_last)
        ours, torchs = DistributedSampler(*options), TorchSampler(*options)
        ours.set_epoch(epoch)
        torchs.set_epoch(epoch)
        assert list(ours) == list(torchs)
        assert len(ours) == len(torchs)
        compared += 1
        indices_compared += len(ours)
record(compared=compared, indices_compared=indices_compared)

# %% [markdown]
# ### Without it
#
# Two ranks, the same seed, `shuffle=True`: both read the same sequences.


# %% name="without-sampler"
def read_epoch(rank: int, use_sampler: bool) -> list[list[int]]:
    miniddp.set_seed(0)
    indices = range(len(sequences))
    choose = {"sampler": DistributedSampler(indices)} if use_sampler else {"shuffle": True}
    loader = DataLoader(indices, batch_size=4, **choose)
    batches = [batch.tolist() for batch in loader]
    for step, batch in enumerate(batches[:3]):
        print(f"step {step}: {spaced(batch)}")
    print(f"{len(batches)} steps in the epoch")
    return batches


without = miniddp.run_ranks(read_epoch, 2, False)
assert without[0] == without[1]
show_ranks(without)

# %% name="with-sampler"
with_sampler = miniddp.run_ranks(read_epoch, 2, True)
first, second = (set(itertools.chain(*batches)) for batches in with_sampler)
assert not first & second, "their number is even"
assert len(first | second) == len(sequences)
assert len(with_sampler[0]) <= len(without[0]) / 2 + 1
show_ranks(with_sampler)

# %% [markdown]
# ### Another order in each epoch

# %% name="set-epoch"
plain, moved = (DistributedSampler(SAMPLES, 2, rank=0) for _ in range(2))
rows = []
for epoch in range(3):
    moved.set_epoch(epoch)
    rows.append([epoch, spaced(plain), spaced(moved)])
assert len({row[1] for row in rows}) == 1
assert len({row[2] for row in rows}) == 3
table(rows, ["epoch", "without set_epoch", "with set_epoch"], align="rll")

# %% [markdown]
# ### Padding or dropping

# %% name="pad-or-drop"
rows = []
for rank in range(3):
    padded = list(DistributedSampler(SAMPLES, 3, rank, shuffle=False))
    dropped = list(DistributedSampler(SAMPLES, 3, rank, shuffle=False, drop_last=True))
    rows.append([rank, spaced(padded), spaced(dropped)])
padded, dropped = (
    every_rank(3, lambda rank, d=drop: DistributedSampler(SAMPLES, 3, rank, False, 0, d))
    for drop in (False, True)
)
assert Counter(padded) - Counter(SAMPLES) == Counter([0, 1])
assert set(SAMPLES) - set(dropped) == {9}
table(rows, ["rank", "padded", "drop_last"], align="rll")

# %% [markdown]
# ### Different seeds
#
# Each rank cuts its share out of a shuffle of its own.

# %% name="different-seeds"
rows = []
for world_size in (2, 4, 8):
    times = Counter(
        every_rank(
            world_size,
            lambda rank, n=world_size: DistributedSampler(sequences, n, rank, seed=rank),
        )
    )
    never = 1 - len(times) / len(sequences)
    twice = sum(count > 1 for count in times.values()) / len(sequences)
    expected = (1 - 1 / world_size) ** world_size
    assert abs(never - expected) < 0.05
    assert twice > 0.1
    rows.append([world_size, *(f"{share:.1%}" for share in (never, twice, expected))])
    record(**{f"never_{world_size}": 100 * never, f"twice_{world_size}": 100 * twice})
table(rows, ["ranks", "read by no rank", "read more than once", "(1 − 1/N)^N"], align="rrrr")

# %% [markdown]
# ## Exact evaluation
#
# A model that has trained a little, on one process. The loss of each held-out sequence is computed
# once; then different ways to share the sequences are counted.


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


# %% name="padded-loss"
def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


FEW = losses[:50]
exact = mean(FEW)
found: dict[str, list[float]] = {"repeated": [], "mean of the ranks": []}
RANKS = range(1, len(FEW) + 1)
for world_size in RANKS:
    padded = every_rank(
        world_size, lambda rank, n=world_size: DistributedSampler(FEW, n, rank, shuffle=False)
    )
    shards = [shard(len(FEW), world_size, rank) for rank in range(world_size)]
    found["repeated"].append(mean([FEW[i] for i in padded]))
    found["mean of the ranks"].append(mean([mean([FEW[i] for i in own]) for own in shards]))
    summed = math.fsum(FEW[i] for own in shards for i in own) / sum(map(len, shards))
    assert summed == exact, "sums and counts, on any number of ranks"
assert all(max(abs(value - exact) for value in way) > 0.01 for way in found.values())

fig, axes = plt.subplots(figsize=(5, 3))
looks = {"repeated": ("x-", FOREGROUND), "mean of the ranks": ("o--", MUTED)}
for name, (look, color) in looks.items():
    axes.plot(RANKS, found[name], look, color=color, markersize=4, linewidth=1, label=name)
axes.axhline(exact, color=FOREGROUND, linewidth=3, label="sums and counts")
axes.set(xlabel="ranks", ylabel="loss of one model")
axes.legend(loc="lower center", bbox_to_anchor=(0.44, 1), ncols=3, columnspacing=1)
figure(fig)

# %% name="padded-values"
record(
    few=len(FEW),
    few_exact=exact,
    few_lowest=min(itertools.chain(*found.values())),
    few_highest=max(itertools.chain(*found.values())),
)


# %% name="exact-evaluation"
def evaluate_on(rank: int) -> int:
    mine = build_language_model().to(device())
    mine.load_state_dict(weights)
    own = len(shard(len(held_out), dist.get_world_size(), rank))
    print(f"reads {own} sequences", flush=True)
    runpy.run_path("stages/3_sharding.py")["evaluate"](mine, held_out)
    return own


weights = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
evaluated = miniddp.run_ranks(evaluate_on, 4)
assert sum(evaluated) == len(held_out)
assert len(set(evaluated)) > 1, "the shards differ in length"
assert evaluated.outputs[0].splitlines()[-1] == f"held-out loss {mean(losses):.4f}"
record(alone=mean(losses))
show_ranks(evaluated)

# %% [markdown]
# ## The program of this chapter

# %% name="stage"
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
launched = subprocess.run(
    [*LAUNCHER, "--nproc_per_node=2", "stages/3_sharding.py"],
    env={**os.environ, "OMP_NUM_THREADS": "1"},
    capture_output=True,
    text=True,
    timeout=600,
)
assert launched.returncode == 0, launched.stderr
print(launched.stdout, end="")
printed = re.findall(r"loss (\d+\.\d+)", launched.stdout)
assert float(printed[-1]) < float(printed[0]) - 0.5, "the held-out loss is below that of step 20"

# %% [markdown]
# ## MRPC, from text to batches

# %% name="pair"
equivalent = sum(pairs["label"])
for i in (0, 1):
    for name in ("sentence1", "sentence2", "label"):
        print(textwrap.fill(f"{name + ':':11}{pairs[i][name]}", 72, subsequent_indent=" " * 11))
record(
    train_pairs=len(pairs),
    test_pairs=len(test_pairs),
    equivalent_share=100 * equivalent / len(pairs),
)

# %% [markdown]
# A small tokenizer, trained on the training sentences: a recording must not depend on a download.

# %% name="tokens"
BATCH = 8  # pairs, of each rank
options = Options(model="tiny", batch_size=BATCH)
sentences = pairs["sentence1"][:] + pairs["sentence2"][:]
tokenizer = load_tokenizer(sentences, "tiny", pretrained=False)
encoded = encode(pairs, tokenizer, options.max_length)
first_tokens = encoded[0]["input_ids"][:8]
print(first_tokens, "…")
print([tokenizer.decode(token) for token in first_tokens], "…")
lengths = [len(tokens) for tokens in encoded["input_ids"]]
record(
    vocabulary=len(tokenizer),
    shortest=min(lengths),
    longest=max(lengths),
    mean_length=sum(lengths) / len(lengths),
    max_length=options.max_length,
    cut=sum(length == options.max_length for length in lengths),
)

# %% name="batch"
batch = collate([encoded[i] for i in range(4)], tokenizer)
assert batch["input_ids"].shape[1] % 8 == 0
assert batch["attention_mask"].sum(dim=1).tolist() == lengths[:4]
for name, tensor in batch.items():
    print(f"{name:15} {tuple(tensor.shape)!s:8} {tensor.dtype}")
print("tokens of each row:", spaced(lengths[:4]))
print("end of row 0:      ", spaced(batch["input_ids"][0, -6:].tolist()))
print("end of its mask:   ", spaced(batch["attention_mask"][0, -6:].tolist()))

# %% [markdown]
# ### What padding costs
#
# The share of padding among all tokens of an epoch, for several ways to pad.


# %% name="padding-share"
def padded_to(batch: Sequence[int], multiple: int) -> int:
    """The tokens of each row when a batch with these lengths is padded."""
    return math.ceil(max(batch) / multiple) * multiple


def batches_of(sizes: Sequence[int], batch_size: int) -> list[Sequence[int]]:
    return [sizes[i : i + batch_size] for i in range(0, len(sizes), batch_size)]


def padding_share(
    batches: Iterable[Sequence[int]], padded: Callable[[Sequence[int]], int]
) -> float:
    """Which part of the tokens, in percent, is padding."""
    total, real = 0, 0
    for batch in batches:
        total += padded(batch) * len(batch)
        real += sum(batch)
    return 100 * (1 - real / total)


order = epoch_order(len(pairs), shuffle=True, seed=0, epoch=0)
shuffled = [lengths[i] for i in order]
ways = {
    "the longest pair of all": lambda _: padded_to(lengths, 8),
    "the longest of the batch": lambda batch: padded_to(batch, 1),
    "and on to a multiple of 8": lambda batch: padded_to(batch, 8),
    "and on to a multiple of 32": lambda batch: padded_to(batch, 32),
}
in_batches = batches_of(shuffled, BATCH)
shares = {name: padding_share(in_batches, way) for name, way in ways.items()}
shapes = {name: len({way(batch) for batch in in_batches}) for name, way in ways.items()}
all_pairs, of_batch, by_8, by_32 = shares.values()
assert of_batch < by_8 < by_32 < all_pairs
assert (by_8 - of_batch) < of_batch / 2
measured = collate([encoded[i] for i in order[:BATCH]], tokenizer)
assert measured["input_ids"].shape[1] == padded_to(shuffled[:BATCH], 8)
record(pairs_in_batch=BATCH, padding_of_batch=of_batch, padding_added_by_8=by_8 - of_batch)
table(
    [[name, f"{shares[name]:.1f}", shapes[name]] for name in ways],
    ["every row is padded to", "padding, %", "different lengths"],
    align="lrr",
)

# %% name="padding-figure"
SIZES = (1, 2, 4, 8, 16, 32, 64)


def sorted_by_length(batch_size: int) -> list[Sequence[int]]:
    """Batches of pairs of similar length."""
    return batches_of(sorted(lengths), batch_size)


curves = {
    "shuffled, multiple of 8": [
        padding_share(batches_of(shuffled, size), ways["and on to a multiple of 8"])
        for size in SIZES
    ],
    "shuffled, longest of the batch": [
        padding_share(batches_of(shuffled, size), ways["the longest of the batch"])
        for size in SIZES
    ],
    "sorted by length, multiple of 8": [
        padding_share(sorted_by_length(size), ways["and on to a multiple of 8"]) for size in SIZES
    ],
}
fig, axes = plt.subplots()
for (name, shares), style, color in zip(
    curves.items(), ("-o", "--s", ":^"), (FOREGROUND, MUTED, FOREGROUND), strict=True
):
    axes.plot(SIZES, shares, style, color=color, label=name)
axes.set(xscale="log", xlabel="pairs in a batch", ylabel="padding, % of the tokens", ylim=(0, None))
axes.set_xticks(SIZES, [str(size) for size in SIZES])
axes.minorticks_off()
axes.legend()
figure(fig)

# %% name="padding-values"
record(padding_sorted=curves["sorted by length, multiple of 8"][SIZES.index(BATCH)])

# %% [markdown]
# ## The loader

# %% name="loader-error"
try:
    DataLoader(pairs, batch_size=BATCH, shuffle=True, sampler=DistributedSampler(pairs, 2, 0))
    raise AssertionError("the loader took both")
except ValueError as error:
    print(f"ValueError: {error}")


# %% name="rank-batches"
def first_batches(rank: int) -> int:
    miniddp.set_seed(0)
    loader = build_loader(encoded, tokenizer, options)
    for step, batch in enumerate(itertools.islice(loader, 3)):
        rows, tokens = batch["input_ids"].shape
        print(f"step {step}: {rows} × {tokens}, labels {spaced(batch['labels'].tolist())}")
    print(f"{len(loader)} steps")
    return len(loader)


loaders = miniddp.run_ranks(first_batches, 2)
assert loaders[0] == loaders[1] == len(pairs) // (2 * BATCH)
show_ranks(loaders)


# %% [markdown]
# ### Workers
#
# Each sample draws a random number, as augmentation would. The loader has two workers, which take
# their seeds from the loader's generator, or from the rank's if the loader has none.


# %% name="worker-seeds"
class Noise(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        return torch.rand(()).item()


def draw(rank: int, offset: int, make_generator: Callable | None) -> list[str]:
    miniddp.set_seed(0, rank_offset=offset * rank)
    loader = DataLoader(
        Noise(),
        batch_size=None,
        sampler=DistributedSampler(Noise(), shuffle=False),
        num_workers=2,
        multiprocessing_context="fork",
        generator=make_generator and make_generator(rank),
    )
    return [f"{number:.4f}" for number in loader]


cases = {
    "0 | none": (0, None),
    "rank | none": (1, None),
    "rank | unseeded": (1, lambda rank: torch.Generator()),
    "0 | seeded by rank": (0, lambda rank: torch.Generator().manual_seed(rank)),
}
rows, verdicts = [], []
for case, arguments in cases.items():
    drawn = miniddp.run_ranks(draw, 2, *arguments)
    verdicts.append("equal" if drawn[0] == drawn[1] else "different")
    if verdicts[-1] == "different":
        assert not set(drawn[0]) & set(drawn[1])
    rows.append([*case.split(" | "), drawn[0][0], drawn[1][0], verdicts[-1]])
assert verdicts == ["equal", "different", "equal", "different"]
table(rows, ["seed", "loader's generator", "rank 0", "rank 1", "numbers"], align="lllll")


# %% [markdown]
# ## Go on in the middle of an epoch
#
# Two ranks, sixteen samples, batches of two. After two batches the program ends.


# %% name="resume"
def some_batches(sampler: DistributedSampler, number: int | None) -> list[list[int]]:
    loader = DataLoader(range(len(sampler.dataset)), batch_size=2, sampler=sampler)
    return [batch.tolist() for batch in itertools.islice(loader, number)]


texts, read = [], []
for rank in range(2):
    sampler = DistributedSampler(range(16), 2, rank)
    sampler.set_epoch(5)
    before = some_batches(sampler, 2)
    state = sampler.state_dict()
    resumed = DistributedSampler(range(16), 2, rank)
    resumed.load_state_dict(state)
    after = some_batches(resumed, None)
    read += itertools.chain(*before, *after)
    position = f"epoch {state['epoch']}, consumed {state['consumed']}"
    texts.append(f"before: {before}\nstate:  {position}\nafter:  {after}")
assert sorted(read) == list(range(16))
show_ranks(texts)

# %% [markdown]
# The same on the training pairs, on four ranks, ended after fifty steps.

# %% name="resume-mrpc"
DONE = 50


def take(sampler: DistributedSampler, steps: int | None) -> list[int]:
    return list(itertools.islice(sampler, None if steps is None else steps * BATCH))


def times_read(go_on: Callable[[DistributedSampler, dict], Iterable[int]]) -> list[int]:
    """How many pairs are trained on never, once and more often in the interrupted epoch."""
    times: Counter[int] = Counter()
    for rank in range(WORLD_SIZE):
        sampler = DistributedSampler(pairs, WORLD_SIZE, rank)
        times.update(take(sampler, DONE))
        times.update(go_on(DistributedSampler(pairs, WORLD_SIZE, rank), sampler.state_dict()))
    assert sum(times.values()) == len(pairs)
    return [
        len(pairs) - len(times),
        sum(count == 1 for count in times.values()),
        sum(count > 1 for count in times.values()),
    ]


def with_the_state(sampler: DistributedSampler, state: dict) -> Iterable[int]:
    sampler.load_state_dict(state)
    return list(sampler)


def from_the_start(sampler: DistributedSampler, state: dict) -> Iterable[int]:
    return list(sampler)[: len(sampler) - state["consumed"]]


def with_another_shuffle(sampler: DistributedSampler, state: dict) -> Iterable[int]:
    sampler.set_epoch(1)
    return from_the_start(sampler, state)


ways = {
    "load the state": with_the_state,
    "begin the epoch again": from_the_start,
    "begin with another shuffle": with_another_shuffle,
}
rows = [[name, *times_read(go_on)] for name, go_on in ways.items()]
assert rows[0][1:] == [0, len(pairs), 0]
assert all(row[1] > 0 and row[3] > 0 for row in rows[1:])
record(done=DONE)
table(rows, ["the rest of the epoch", "never", "once", "twice"], align="lrrr")

# %% [markdown]
# A loader with workers asks the sampler for batches ahead of the training loop.

# %% name="resume-workers"
ahead = {}
for workers in (0, 2):
    sampler = DistributedSampler(range(64), 2, 0)
    loader = DataLoader(range(64), batch_size=2, sampler=sampler, num_workers=workers)
    iterator = iter(loader)
    batches_done = 3
    for _ in range(batches_done):
        next(iterator)
    ahead[workers] = sampler.consumed
    print(f"{workers} workers: {batches_done * 2} samples trained on, {sampler.consumed} given out")
assert ahead[0] == batches_done * 2 < ahead[2]
assert sampler.state_dict(consumed=batches_done * 2)["consumed"] == batches_done * 2
del iterator

# %% [markdown]
# ### More ranks than samples

# %% name="empty-shard"
FEW = range(3)
print("shard:", [len(shard(len(FEW), 8, rank)) for rank in range(8)])
print("torch, padded:", every_rank(8, lambda rank: TorchSampler(FEW, 8, rank, shuffle=False)))
torch_dropping = [TorchSampler(FEW, 8, rank, drop_last=True) for rank in range(8)]
assert all(list(sampler) == [] for sampler in torch_dropping)
print("torch, drop_last:", [len(sampler) for sampler in torch_dropping])
try:
    DistributedSampler(FEW, 8, 0, drop_last=True)
    raise AssertionError("an empty shard was accepted")
except ValueError as error:
    print(textwrap.fill(f"miniddp, drop_last: ValueError: {error}", 72, subsequent_indent="  "))

# %% [markdown]
# ### What `datasets` brings

# %% name="datasets-shards"
ten = Dataset.from_dict({"sample": SAMPLES})
ways = {
    "shard": lambda rank: ten.shard(3, rank),
    "shard, contiguous=False": lambda rank: ten.shard(3, rank, contiguous=False),
    "split_dataset_by_node": lambda rank: split_dataset_by_node(ten, rank, 3),
}
rows = []
for name, part in ways.items():
    parts = [part(rank)["sample"][:] for rank in range(3)]
    assert sorted(itertools.chain(*parts)) == SAMPLES
    assert len({len(samples) for samples in parts}) > 1
    rows.append([name, *map(spaced, parts)])
table(rows, ["", "rank 0", "rank 1", "rank 2"], align="llll")

# %% [markdown]
# ## Streams
#
# A data set that can only be read from its beginning to its end has no sampler. Six samples, one
# rank, a loader with two workers.


# %% name="stream-workers"
class Numbers(IterableDataset):
    """Every worker reads all of them."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


class SharedNumbers(IterableDataset):
    """Every worker of every rank reads its own."""

    def __init__(self, world_size: int, rank: int):
        self.world_size, self.rank = world_size, rank

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        number = self.rank * workers + worker
        return itertools.islice(range(6), number, None, self.world_size * workers)


def read_by(dataset: IterableDataset, workers: int = 2) -> list[int]:
    return list(DataLoader(dataset, None, num_workers=workers, multiprocessing_context="fork"))


whole = read_by(Numbers())
parts = [read_by(SharedNumbers(1, 0)), read_by(SharedNumbers(2, 0)), read_by(SharedNumbers(2, 1))]
assert sorted(whole) == sorted([*range(6), *range(6)])
assert sorted(parts[0]) == sorted(parts[1] + parts[2]) == list(range(6))
print("Numbers:                 ", spaced(whole))
print("SharedNumbers, one rank: ", spaced(parts[0]))
for rank in range(2):
    print(f"SharedNumbers, rank {rank}:   ", spaced(parts[rank + 1]))


# %% [markdown]
# The same with `datasets`: files of four samples, two ranks.


# %% name="stream-files"
def read_files(files: list[int]) -> Iterator[dict[str, int]]:
    for file in files:
        opened.append(file)
        yield from ({"sample": 4 * file + i} for i in range(4))


def stream_of(files: int) -> Stream:
    return Stream.from_generator(read_files, gen_kwargs={"files": list(range(files))})


def samples_in(stream: Iterable[dict[str, int]]) -> list[int]:
    return [row["sample"] for row in stream]


rows = []
for files in (4, 3):
    parts = []
    for rank in range(2):
        opened: list[int] = []
        parts.append(samples_in(split_dataset_by_node(stream_of(files), rank, 2)))
        rows.append([files, rank, spaced(dict.fromkeys(opened)), spaced(parts[-1])])
    assert sorted(itertools.chain(*parts)) == list(range(4 * files))
assert [row[2] for row in rows] == ["0 2", "1 3", "0 1 2", "0 1 2"]
table(rows, ["files", "rank", "opens", "samples"], align="rrll")

# %% name="stream-epochs"
shuffled_stream = stream_of(4).shuffle(seed=0, buffer_size=4)
read = {}
for where in ("before the split", "on the part"):
    for epoch in range(2):
        if where == "before the split":
            shuffled_stream.set_epoch(epoch)
        part = split_dataset_by_node(shuffled_stream, 0, 2)
        if where == "on the part":
            part.set_epoch(epoch)
        read[where, epoch] = samples_in(part)
assert read["before the split", 0] == read["before the split", 1]
assert read["on the part", 0] != read["on the part", 1]
table(
    [[where, epoch, spaced(samples)] for (where, epoch), samples in read.items()],
    ["set_epoch", "epoch", "rank 0 reads"],
    align="lrl",
)


# %% name="stream-resume"
def resumed(stream: Stream, epoch: int, told: int) -> list[list[int]]:
    """What is read before the state is saved after three samples, and after it is loaded."""
    part, again = (split_dataset_by_node(stream, 0, 2) for _ in range(2))
    part.set_epoch(epoch)
    again.set_epoch(told)
    before = samples_in(itertools.islice(part, 3))
    again.load_state_dict(part.state_dict())
    return [before, samples_in(again)]


datasets.logging.set_verbosity_error()  # it warns of what is lost here
ways = {
    "as stored": resumed(stream_of(4), 1, 1),
    "shuffled": resumed(shuffled_stream, 1, 1),
    "as stored, without set_epoch": resumed(stream_of(4), 1, 0),
}
counts = [Counter(itertools.chain(*read)) for read in ways.values()]
assert counts[0] == Counter(samples_in(split_dataset_by_node(stream_of(4), 0, 2)))
assert len(counts[1]) < len(counts[0])
assert max(counts[2].values()) == 2
table(
    [[name, *map(spaced, read)] for name, read in ways.items()],
    ["stream", "before", "after"],
    align="lll",
)


# %% [markdown]
# Parts of a stream may be unequal. A small all-reduce before each step ends the epoch on all ranks
# when one has nothing left.


# %% name="stream-together"
def while_all_have_one(batches: Iterable) -> Iterator:
    iterator = iter(batches)
    while True:
        batch = next(iterator, None)
        has_one = torch.tensor(int(batch is not None), device=device())
        dist.all_reduce(has_one, op=dist.ReduceOp.MIN)
        if not has_one:
            return
        yield batch


def steps_of_stream(rank: int) -> int:
    own = SharedNumbers(4, rank)
    taken = len(list(while_all_have_one(own)))
    print(f"samples: {len(list(own))}, steps: {taken}")
    return taken


taken = miniddp.run_ranks(steps_of_stream, 4)
assert list(taken) == [1, 1, 1, 1]
show_ranks(taken)
