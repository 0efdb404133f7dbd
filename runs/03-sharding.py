# %% [markdown]
# # Sharding the data
#
# Which rank trains on which samples. This run cuts data into shards, shows what waits when they
# are uneven, compares samplers, takes the sentence pairs of MRPC from text to batches, counts what
# padding costs, evaluates exactly, and goes on in the middle of an epoch.

# %% name="setup"
import functools
import itertools
import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler as TorchSampler

import miniddp
from book import FOREGROUND, MUTED, data_dir, figure, provenance, record, show_ranks, table
from miniddp.data import build_loader, collate, encode, load_mrpc, to_device
from miniddp.launch import RanksTimedOut
from miniddp.model import load_model, load_tokenizer
from miniddp.options import Options
from miniddp.process import device
from miniddp.sampler import (
    DistributedSampler,
    check_equal_steps,
    epoch_order,
    shard,
)
from miniddp.train import evaluate

provenance(device=device(), world_size=[2, 3, 4], backend="gloo")
pairs = load_mrpc(data_dir())
test_pairs = load_mrpc(data_dir(), "test")
SAMPLES = list(range(10))


def say(text: str) -> None:
    """Prints at once, in lines that are short enough for three ranks beside each other."""
    print(textwrap.fill(text, 34, subsequent_indent="  "), flush=True)


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
# On the real training pairs: batches of 8 for each rank, an incomplete last batch dropped. Whether
# the split works depends on the number of ranks.

# %% name="mrpc-steps"
BATCH = 8
rows = []
for world_size in range(2, 9):
    first, last = (
        len(last_takes_the_rest(len(pairs), world_size, rank)) for rank in (0, world_size - 1)
    )
    verdict = "equal" if first // BATCH == last // BATCH else "waits"
    numbers = f"{first} and {last}", f"{first // BATCH} and {last // BATCH}"
    rows.append([world_size, *numbers, verdict])
assert {row[-1] for row in rows} == {"equal", "waits"}
table(rows, ["ranks", "pairs", "batches", ""], align="rrrl")

# %% [markdown]
# ## Shards

# %% name="shards"
for name, contiguous in (("contiguous", True), ("strided", False)):
    shards = [shard(len(SAMPLES), 3, rank, contiguous) for rank in range(3)]
    assert sorted(itertools.chain(*shards)) == SAMPLES
    print(f"{name}:")
    for rank, positions in enumerate(shards):
        print(f"  rank {rank}: {spaced(positions)}")

# %% [markdown]
# With strided shards, every step joins the batch that one process would take.

# %% name="joined"
WORLD_SIZE = 4
order = epoch_order(len(pairs), shuffle=True, seed=0, epoch=0)
steps = len(order) // (WORLD_SIZE * BATCH)


def in_step(positions: Sequence[int], step: int) -> Sequence[int]:
    return positions[step * BATCH : (step + 1) * BATCH]


agreeing = {}
for contiguous in (False, True):
    shards = [shard(len(order), WORLD_SIZE, rank, contiguous) for rank in range(WORLD_SIZE)]
    agreeing[contiguous] = sum(
        sorted(position for positions in shards for position in in_step(positions, step))
        == list(range(step * WORLD_SIZE * BATCH, (step + 1) * WORLD_SIZE * BATCH))
        for step in range(steps)
    )
assert agreeing == {False: steps, True: 0}
record(
    ranks=WORLD_SIZE,
    batch=BATCH,
    joined_batch=WORLD_SIZE * BATCH,
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
# Two ranks, the same seed, `shuffle=True`: both read the same pairs.


# %% name="without-sampler"
def read_epoch(rank: int, use_sampler: bool) -> list[list[int]]:
    miniddp.set_seed(0)
    indices = range(len(pairs))
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
assert len(first & second) <= 1, "one pair is read twice if their number is odd"
assert len(first | second) == len(pairs)
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

# %% name="pad-or-drop-mrpc"
repeated_at = {n: -len(pairs) % n for n in (2, 3, 7, 8, 64, 1024)}
dropped_at = {n: len(pairs) % n for n in repeated_at}
for n in repeated_at:
    read_in_all = every_rank(n, lambda rank, n=n: DistributedSampler(pairs, n, rank))
    kept_in_all = every_rank(
        n, lambda rank, n=n: DistributedSampler(pairs, n, rank, drop_last=True)
    )
    assert len(read_in_all) - len(set(read_in_all)) == repeated_at[n]
    assert len(pairs) - len(set(kept_in_all)) == dropped_at[n]
rows = [[n, math.ceil(len(pairs) / n), repeated_at[n], dropped_at[n]] for n in repeated_at]
table(rows, ["ranks", "samples per rank, padded", "repeated", "or dropped"], align="rrrr")

# %% [markdown]
# ### Different seeds
#
# Each rank cuts its share out of a shuffle of its own.

# %% name="different-seeds"
rows = []
for world_size in (2, 4, 8):
    times = Counter(
        every_rank(
            world_size, lambda rank, n=world_size: DistributedSampler(pairs, n, rank, seed=rank)
        )
    )
    never = 1 - len(times) / len(pairs)
    twice = sum(count > 1 for count in times.values()) / len(pairs)
    expected = (1 - 1 / world_size) ** world_size
    assert abs(never - expected) < 0.05
    assert twice > 0.1
    rows.append([world_size, *(f"{share:.1%}" for share in (never, twice, expected))])
    record(**{f"never_{world_size}": 100 * never, f"twice_{world_size}": 100 * twice})
table(rows, ["ranks", "read by no rank", "read more than once", "(1 − 1/N)^N"], align="rrrr")

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
options = Options(model="tiny", batch_size=BATCH)
sentences = pairs["sentence1"][:] + pairs["sentence2"][:]
tokenizer = load_tokenizer(sentences, "tiny", pretrained=False)
encoded = encode(pairs, tokenizer, options.max_length)
encoded_test = encode(test_pairs, tokenizer, options.max_length)
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
record(padding_of_batch=of_batch, padding_by_8=by_8, padding_added_by_8=by_8 - of_batch)
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
record(
    padding_sorted=curves["sorted by length, multiple of 8"][SIZES.index(BATCH)],
    padding_one=curves["shuffled, multiple of 8"][0],
    padding_64=curves["shuffled, multiple of 8"][-1],
)

# %% [markdown]
# Ranks with long pairs are slower. If a step takes as long as its tokens are many, the others wait.

# %% name="waiting"
widths = [
    [padded_to([lengths[order[i]] for i in positions], 8) for positions in by_rank]
    for step in range(steps)
    for by_rank in [
        [in_step(shard(len(order), WORLD_SIZE, rank), step) for rank in range(WORLD_SIZE)]
    ]
]
slowest = sum(map(max, widths))
mean_width = sum(sum(width) / WORLD_SIZE for width in widths)
waiting = 100 * (1 - mean_width / slowest)
assert 0 < waiting < 50
record(waiting=waiting)

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
# Each sample draws a random number, as augmentation would. The loader has two workers.


# %% name="worker-seeds"
class Noise(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> str:
        return f"sample {index} draws {torch.rand(()).item():.4f}"


def draw(rank: int, own_seed: bool) -> list[str]:
    miniddp.set_seed(0, rank_offset=rank if own_seed else 0)
    sampler = DistributedSampler(Noise(), shuffle=False)
    loader = DataLoader(
        Noise(), batch_size=1, sampler=sampler, num_workers=2, multiprocessing_context="fork"
    )
    lines = [line for batch in loader for line in batch]
    print("\n".join(lines))
    return [line.split()[-1] for line in lines]


same_noise = miniddp.run_ranks(draw, 2, False)
assert same_noise[0] == same_noise[1], "the same seed for the workers of both ranks"
show_ranks(same_noise)

# %% name="worker-seeds-own"
own_noise = miniddp.run_ranks(draw, 2, True)
assert not set(own_noise[0]) & set(own_noise[1])
show_ranks(own_noise)

# %% [markdown]
# ## Exact evaluation
#
# A model that has trained a little, on one process. Which test pairs it gets right is computed
# once; then different ways to share the pairs are counted.


# %% name="model"
def trained(number_of_steps: int) -> nn.Module:
    miniddp.set_seed(0)
    model = load_model("tiny", pretrained=False).to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for i in range(number_of_steps):
        rows = [encoded[j] for j in order[i * 16 : (i + 1) * 16]]
        model(**to_device(collate(rows, tokenizer))).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def verdicts(model: nn.Module, rows: Dataset) -> list[bool]:
    """Which rows the model classifies correctly."""
    loader = DataLoader(rows, 32, collate_fn=functools.partial(collate, tokenizer=tokenizer))
    right: list[Tensor] = []
    for batch in map(to_device, loader):
        right.append(model(**batch).logits.argmax(dim=-1) == batch["labels"])
    return torch.cat(right).tolist()


torch.set_num_threads(1)  # not slowed down by other programs on the machine
model = trained(40)
right = verdicts(model, encoded_test)
record(correct=sum(right), accuracy=100 * sum(right) / len(right))


# %% name="padded-accuracy"
def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


rows, errors = [], {}
for number, world_size in ((len(right), 4), (len(right), 64), (100, 8), (100, 64), (50, 32)):
    part = right[:number]
    read = [list(DistributedSampler(part, world_size, r, shuffle=False)) for r in range(world_size)]
    exact = [shard(number, world_size, rank) for rank in range(world_size)]
    counted = [part[i] for indices in read for i in indices]
    of_ranks = mean([mean([part[i] for i in indices]) for indices in exact])
    summed = sum(part[i] for indices in exact for i in indices) / sum(map(len, exact))
    assert summed == mean(part)
    errors[number, world_size] = 100 * (mean(counted) - mean(part))
    accuracies = [f"{100 * value:.2f}" for value in (mean(counted), of_ranks, summed)]
    rows.append([number, world_size, len(counted), *accuracies])
assert max(map(abs, errors.values())) > 0.1
table(
    rows,
    ["pairs", "ranks", "read", "padded", "mean of ranks", "exact"],
    align="rrrrrr",
)

# %% name="exact-evaluation"
NUMBER = 99


def evaluate_on(rank: int) -> tuple[int, float]:
    miniddp.set_seed(0)
    mine = load_model("tiny", pretrained=False).to(device())
    mine.load_state_dict(weights)
    part = encoded_test.select(range(NUMBER))
    own = len(shard(NUMBER, 4, rank))
    _, accuracy = evaluate(mine, part, tokenizer, batch_size=BATCH)
    print(f"reads {own} pairs in {math.ceil(own / BATCH)} batches")
    print(f"accuracy of all ranks: {accuracy:.6f}")
    return own, accuracy


weights = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
evaluated = miniddp.run_ranks(evaluate_on, 4)
own, accuracies = zip(*evaluated, strict=True)
assert sum(own) == NUMBER
assert len(set(own)) > 1, "the shards differ in length"
assert len(set(accuracies)) == 1
assert accuracies[0] == sum(right[:NUMBER]) / NUMBER
record(evaluated=NUMBER, evaluated_correct=sum(right[:NUMBER]))
show_ranks(evaluated)


# %% [markdown]
# ## Go on in the middle of an epoch
#
# Two ranks, sixteen samples, batches of two. After two batches the program is ended.


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
