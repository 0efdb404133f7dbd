# %% [markdown]
# # Data
#
# The sentence pairs of MRPC, from text to batches. What padding costs, the random numbers of loader
# workers, a resume in the middle of an epoch, more ranks than samples, and streams.

# %% name="setup"
import itertools
import textwrap
from collections import Counter
from collections.abc import Iterable

import datasets
import matplotlib.pyplot as plt
import torch
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler as TorchSampler

import miniddp
from book import FOREGROUND, MUTED, data_dir, figure, provenance, record, show_ranks, table
from finetune.data import build_loader, collate, encode, load_mrpc
from finetune.model import load_tokenizer
from finetune.options import Options
from instruments.sharding import of_all_ranks, padding_share, times_read
from instruments.streams import (
    Numbers,
    SharedNumbers,
    part_of,
    read_and_resume,
    read_with_two_workers,
    samples_in,
    stream_of,
    while_all_have_one,
)
from instruments.workers import draw
from miniddp.process import device
from miniddp.sampler import DistributedSampler, epoch_order, shard

provenance(device=device(), world_size=[2, 4], backend="gloo")
pairs = load_mrpc(data_dir())
test_pairs = load_mrpc(data_dir(), "test")


def spaced(numbers: Iterable[int]) -> str:
    return " ".join(map(str, numbers))


# %% [markdown]
# ## From text to batches

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

# %% name="padding-figure"
order = epoch_order(len(pairs), shuffle=True, seed=0, epoch=0)
shuffled = [lengths[i] for i in order]
first_batch = collate([encoded[i] for i in order[:BATCH]], tokenizer)
padding = 100 * (1 - first_batch["attention_mask"].float().mean().item())
assert abs(padding - padding_share(shuffled[:BATCH], BATCH, 8)) < 1e-4, "as the loader pads"

SIZES = (1, 2, 4, 8, 16, 32, 64)
by_8 = [padding_share(shuffled, size, 8) for size in SIZES]
of_batch = [padding_share(shuffled, size, 1) for size in SIZES]
in_order = [padding_share(sorted(lengths), size, 8) for size in SIZES]
fig, axes = plt.subplots()
axes.plot(SIZES, by_8, "-o", color=FOREGROUND, label="shuffled, multiple of 8")
axes.plot(SIZES, of_batch, "--s", color=MUTED, label="shuffled, longest of the batch")
axes.plot(SIZES, in_order, ":^", color=FOREGROUND, label="sorted by length, multiple of 8")
axes.set(xscale="log", xlabel="pairs in a batch", ylabel="padding, % of the tokens", ylim=(0, None))
axes.set_xticks(SIZES, [str(size) for size in SIZES])
axes.minorticks_off()
axes.legend()
figure(fig)

# %% name="padding-values"
here = SIZES.index(BATCH)
assert of_batch[here] < by_8[here] < 1.5 * of_batch[here]
record(
    pairs_in_batch=BATCH,
    padding_of_batch=of_batch[here],
    padding_added_by_8=by_8[here] - of_batch[here],
    padding_sorted=in_order[here],
)

# %% [markdown]
# ## The loader


# %% name="rank-batches" ranks="2"
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


# %% name="worker-seeds" ranks="2"
CASES = [
    ("0", "none", None),
    ("rank", "none", None),
    ("rank", "unseeded", lambda rank: torch.Generator()),
    ("0", "seeded by rank", lambda rank: torch.Generator().manual_seed(rank)),
]


def draw_in_all_cases(rank: int) -> list[list[float]]:
    seeds = {"0": 0, "rank": rank}
    return [draw(rank, seeds[seed], make_generator) for seed, _, make_generator in CASES]


rows = []
of_ranks = miniddp.run_ranks(draw_in_all_cases, 2)
for (seed, generator, _), first, second in zip(CASES, *of_ranks, strict=True):
    verdict = "equal" if first == second else "different"
    assert verdict == "equal" or not set(first) & set(second)
    rows.append([seed, generator, f"{first[0]:.4f}", f"{second[0]:.4f}", verdict])
assert [row[-1] for row in rows] == ["equal", "different", "equal", "different"]
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
STEPS_DONE = 50


def load_the_state(sampler: DistributedSampler, state: dict) -> Iterable[int]:
    sampler.load_state_dict(state)
    return sampler


def begin_the_epoch_again(sampler: DistributedSampler, state: dict) -> Iterable[int]:
    return itertools.islice(sampler, len(sampler) - state["consumed"])


def begin_with_another_shuffle(sampler: DistributedSampler, state: dict) -> Iterable[int]:
    sampler.set_epoch(1)
    return begin_the_epoch_again(sampler, state)


rows = []
for go_on in (load_the_state, begin_the_epoch_again, begin_with_another_shuffle):
    never, once, twice = times_read(len(pairs), 4, STEPS_DONE * BATCH, go_on)
    rows.append([go_on.__name__.replace("_", " "), never, once, twice])
assert rows[0][1:] == [0, len(pairs), 0]
assert all(never > 0 and twice > 0 for _, never, _, twice in rows[1:])
record(done=STEPS_DONE)
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
print("torch, padded:", of_all_ranks(8, lambda rank: TorchSampler(FEW, 8, rank, shuffle=False)))
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
ten = Dataset.from_dict({"sample": range(10)})
ways = {
    "shard": lambda rank: ten.shard(3, rank),
    "shard, contiguous=False": lambda rank: ten.shard(3, rank, contiguous=False),
    "split_dataset_by_node": lambda rank: split_dataset_by_node(ten, rank, 3),
}
rows = []
for name, part in ways.items():
    parts = [part(rank)["sample"][:] for rank in range(3)]
    assert sorted(itertools.chain(*parts)) == list(range(10))
    assert len({len(samples) for samples in parts}) > 1
    rows.append([name, *map(spaced, parts)])
table(rows, ["", "rank 0", "rank 1", "rank 2"], align="llll")

# %% [markdown]
# ## Streams
#
# A data set that can only be read from its beginning to its end has no sampler. Six samples, one
# rank, a loader with two workers.


# %% name="stream-workers"
whole = read_with_two_workers(Numbers())
parts = [
    read_with_two_workers(SharedNumbers(world_size, rank))
    for world_size, rank in ((1, 0), (2, 0), (2, 1))
]
assert sorted(whole) == sorted([*range(6), *range(6)])
assert sorted(parts[0]) == sorted(parts[1] + parts[2]) == list(range(6))
print("Numbers:                 ", spaced(whole))
print("SharedNumbers, one rank: ", spaced(parts[0]))
for rank in range(2):
    print(f"SharedNumbers, rank {rank}:   ", spaced(parts[rank + 1]))

# %% [markdown]
# The same with `datasets`: files of four samples, two ranks.

# %% name="stream-files"
rows = []
for files in (4, 3):
    parts = []
    for rank in range(2):
        opened: list[int] = []
        parts.append(samples_in(part_of(stream_of(files, opened), rank)))
        rows.append([files, rank, spaced(opened), spaced(parts[-1])])
    assert sorted(itertools.chain(*parts)) == list(range(4 * files))
assert [row[2] for row in rows] == ["0 2", "1 3", "0 1 2", "0 1 2"]
table(rows, ["files", "rank", "opens", "samples"], align="rrll")

# %% name="stream-epochs"
shuffled_stream = stream_of(4).shuffle(seed=0, buffer_size=4)
before_the_split, on_the_part = [], []
for epoch in range(2):
    shuffled_stream.set_epoch(epoch)
    before_the_split.append(samples_in(part_of(shuffled_stream, 0)))
    part = part_of(shuffled_stream, 0)
    part.set_epoch(epoch)
    on_the_part.append(samples_in(part))
assert before_the_split[0] == before_the_split[1]
assert on_the_part[0] != on_the_part[1]
rows = [["before the split", epoch, spaced(read)] for epoch, read in enumerate(before_the_split)]
rows += [["on the part", epoch, spaced(read)] for epoch, read in enumerate(on_the_part)]
table(rows, ["set_epoch", "epoch", "rank 0 reads"], align="lrl")

# %% name="stream-resume"
datasets.logging.set_verbosity_error()  # it warns of what is lost here
ways = {
    "as stored": read_and_resume(stream_of(4), epoch=1, told=1),
    "shuffled": read_and_resume(shuffled_stream, epoch=1, told=1),
    "as stored, without set_epoch": read_and_resume(stream_of(4), epoch=1, told=0),
}
counts = [Counter(before + after) for before, after in ways.values()]
assert counts[0] == Counter(samples_in(part_of(stream_of(4), 0)))
assert len(counts[1]) < len(counts[0])
assert max(counts[2].values()) == 2
rows = [[name, spaced(before), spaced(after)] for name, (before, after) in ways.items()]
table(rows, ["stream", "before", "after"], align="lll")

# %% [markdown]
# Parts of a stream may be unequal. A small all-reduce before each step ends the epoch on all ranks
# when one has nothing left.


# %% name="stream-together" ranks="4"
def steps_of_stream(rank: int) -> int:
    part = SharedNumbers(4, rank)
    taken = len(list(while_all_have_one(part)))
    print(f"samples: {len(list(part))}, steps: {taken}")
    return taken


taken = miniddp.run_ranks(steps_of_stream, 4)
assert list(taken) == [1, 1, 1, 1]
show_ranks(taken)
