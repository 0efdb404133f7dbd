"""The data of a training run: encoded pairs, and every rank's batches of them."""

import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from miniddp.agree import on_every_rank
from miniddp.data import FILES, DataError, collate, encode, load_mrpc
from miniddp.model import load_tokenizer
from miniddp.options import Options
from miniddp.process import device, get
from miniddp.sampler import DistributedSampler

if TYPE_CHECKING:
    from datasets import Dataset

Batch = dict[str, torch.Tensor]


class Data(NamedTuple):
    """Encoded pairs, their tokenizer, and a SHA-256 digest of the pairs."""

    train: "Dataset"
    test: "Dataset"
    tokenizer: Any
    digest: str


def build_data(options: Options) -> Data:
    """Encoded training and test pairs; checked to be alike on every rank.

    Raises:
        DataError: on every rank, if one cannot use its data, if they differ, or if the training
            pairs do not fill one joined batch.
    """
    pairs = on_every_rank(
        lambda: {split: load_mrpc(options.data_dir, split) for split in FILES}, DataError
    )
    joined_batch = get("ws") * options.batch_size
    if len(pairs["train"]) < joined_batch:
        raise DataError(
            f"world size {get('ws')} x batch size {options.batch_size} needs {joined_batch} "
            f"training pairs in each step, found {len(pairs['train'])}: use fewer ranks or "
            "smaller batches"
        )
    rows = pairs["train"][:]
    sentences = rows["sentence1"] + rows["sentence2"]
    tokenizer = load_tokenizer(sentences, options.model, options.pretrained)
    train, test = (encode(data, tokenizer, options.max_length) for data in pairs.values())
    digest = hashlib.sha256(json.dumps([train[:], test[:]]).encode()).hexdigest()
    check_same(digest)
    return Data(train, test, tokenizer, digest)


def check_same(digest: str) -> None:
    """Raises a DataError on every rank if the ranks loaded or tokenized different pairs."""
    digests = [""] * get("ws")
    dist.all_gather_object(digests, digest)
    other = [str(rank) for rank, found in enumerate(digests) if found != digests[0]]
    if other:
        raise DataError(f"rank {', '.join(other)} loaded other pairs or tokens than rank 0")


def build_loader(data: "Dataset", tokenizer: Any, options: Options) -> DataLoader[Any]:
    """This rank's micro-batches of an epoch, in an order that any number of ranks shares.

    Rank r of n takes every n-th of the shuffled pairs, so step k joins the k-th run of
    ``n x batch_size`` pairs: the batch that one process would take.
    """
    return DataLoader(
        cast(Any, data),
        batch_size=options.batch_size // options.accumulation,
        sampler=DistributedSampler(data, seed=options.seed, drop_last=True),
        collate_fn=functools.partial(collate, tokenizer=tokenizer),
        drop_last=True,
        generator=torch.Generator(),  # of its own: an epoch draws no random number of training
    )


def batches(loader: DataLoader[Any], options: Options) -> Iterator[Sequence[Batch]]:
    """The micro-batches of each step, one epoch after the other, each in an order of its own.

    Starts where the loader's sampler stands. What does not fill a step is left out, for that epoch.
    """
    sampler = cast(DistributedSampler, loader.sampler)
    for epoch in range(sampler.epoch, options.epochs):
        sampler.set_epoch(epoch)
        micro_batches = iter(loader)
        yield from zip(*[micro_batches] * options.accumulation, strict=False)


def step_count(loader: DataLoader[Any], options: Options) -> int:
    """How many steps the whole training takes."""
    in_all_epochs = len(loader) // options.accumulation * options.epochs
    return min(in_all_epochs, options.steps or in_all_epochs)


def to_device(batch: Batch) -> Batch:
    """The batch on this rank's device."""
    return {name: tensor.to(device()) for name, tensor in batch.items()}
