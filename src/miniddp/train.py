"""Fine-tune a classifier of sentence pairs, on one process or data parallel on many.

    python -m miniddp.train --model tiny
    torchrun --nproc_per_node=2 -m miniddp.train --data-dir data/mrpc --model tiny

Both train on the same joined batches when ``--batch-size`` times the number of ranks is the same.
"""

import functools
import hashlib
import itertools
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from miniddp.data import DataError, collate, encode, load_mrpc
from miniddp.model import SIZES, load_model, load_tokenizer
from miniddp.naive import SimpleDDP
from miniddp.options import option, parse_options
from miniddp.process import destroy_process_group, device, get, init_process_group, set_seed
from miniddp.report import Result, Step, log_summary, summarise
from miniddp.sampler import DistributedSampler, shard

if TYPE_CHECKING:
    from datasets import Dataset

Batch = dict[str, torch.Tensor]
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    """What can be chosen; every field is also a flag of the command line.

    Raises:
        ValueError: a value that cannot be trained with.
    """

    data_dir: str | None = option(None, "folder with the original MRPC files")
    model: str = option("tiny", f"size of the model: {', '.join(SIZES)}")
    pretrained: bool = option(True, "use the published weights where there are any (360m)")
    epochs: int = option(1, "passes over the training pairs")
    steps: int | None = option(None, "stop after this many steps")
    batch_size: int = option(16, "pairs per rank in each step; the joined batch is ranks x this")
    lr: float = option(1e-3, "learning rate of AdamW; pretrained weights want about 2e-5")
    max_length: int = option(128, "tokens of a pair after which the rest is cut off")
    seed: int = option(0, "seed of the initial weights and of the order of the pairs")

    def __post_init__(self) -> None:
        if self.model not in SIZES:
            raise ValueError(f"model must be one of {', '.join(SIZES)}, got {self.model!r}")
        for name in ("epochs", "steps", "batch_size", "max_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0 < self.lr < float("inf"):
            raise ValueError(f"lr must be a positive number, got {self.lr}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")


def train(options: Options) -> Result:
    """Trains and evaluates as one rank of the default process group, which must be running.

    Raises:
        DataError: the data cannot be used, or the training pairs do not fill one joined batch.
    """
    set_seed(options.seed)
    train_data, test_data, tokenizer = build_data(options)
    model = SimpleDDP(load_model(options.model, options.pretrained).to(device()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    loader = build_loader(train_data, tokenizer, options)

    start = clock()
    history = fit(model, optimizer, loader, options)
    seconds = clock() - start
    evaluation_loss, accuracy = evaluate(model.module, test_data, tokenizer, options.batch_size)
    result = summarise(history, seconds, options.batch_size, evaluation_loss, accuracy)
    log_summary(result)
    return result


def build_data(options: Options) -> tuple["Dataset", "Dataset", Any]:
    """Encoded training and test pairs, and their tokenizer; checked to be alike on every rank."""
    pairs = {split: load_mrpc(options.data_dir, split) for split in ("train", "test")}
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
    encoded = {split: encode(data, tokenizer, options.max_length) for split, data in pairs.items()}
    check_same_data(encoded)
    return encoded["train"], encoded["test"], tokenizer


def check_same_data(encoded: dict[str, "Dataset"]) -> None:
    """Raises a DataError on every rank if the ranks loaded or tokenized different pairs."""
    content = json.dumps([data[:] for data in encoded.values()]).encode()
    digests: list[str] = [""] * get("ws")
    dist.all_gather_object(digests, hashlib.sha256(content).hexdigest())
    other = [str(rank) for rank, digest in enumerate(digests) if digest != digests[0]]
    if other:
        raise DataError(f"rank {', '.join(other)} loaded other pairs or tokens than rank 0")


def build_loader(data: "Dataset", tokenizer: Any, options: Options) -> DataLoader[Any]:
    """This rank's batches of every epoch, in an order that any number of ranks shares.

    Rank r of n takes every n-th of the shuffled pairs, so step k joins the k-th run of
    ``n x batch_size`` pairs: the batch that one process would take. What does not fill a joined
    batch is left out, for that epoch.
    """
    sampler = DistributedSampler(data, seed=options.seed, drop_last=True)
    return DataLoader(
        cast(Any, data),
        batch_size=options.batch_size,
        sampler=sampler,
        collate_fn=functools.partial(collate, tokenizer=tokenizer),
        drop_last=True,
    )


def fit(
    model: SimpleDDP, optimizer: torch.optim.Optimizer, loader: DataLoader[Any], options: Options
) -> list[Step]:
    """Trains for the epochs, or fewer steps, that were asked for; returns every step."""
    from tqdm import tqdm

    total = len(loader) * options.epochs
    total = min(total, options.steps or total)
    history: list[Step] = []
    model.train()
    with tqdm(total=total, unit="step", disable=None if get("rank") == 0 else True) as bar:
        for batch in itertools.islice(batches(loader, options.epochs), total):
            history.append(train_step(model, optimizer, batch))
            bar.set_postfix(loss=f"{history[-1].loss.item():.3f}", refresh=False)
            bar.update()
    return history


def batches(loader: DataLoader[Any], epochs: int) -> Iterator[Batch]:
    """The batches of one epoch after the other, each in an order of its own."""
    for epoch in range(epochs):
        cast(DistributedSampler, loader.sampler).set_epoch(epoch)
        yield from loader


def train_step(model: SimpleDDP, optimizer: torch.optim.Optimizer, batch: Batch) -> Step:
    """Forward, backward, synchronise, update."""
    start = clock()
    loss = model(**to_device(batch)).loss
    loss.backward()
    backward_done = clock()
    model.sync_gradients()
    sync_done = clock()
    optimizer.step()
    optimizer.zero_grad()
    return Step(loss.detach(), clock() - start, sync_done - backward_done)


@torch.no_grad()
def evaluate(model: Any, data: "Dataset", tokenizer: Any, batch_size: int) -> tuple[float, float]:
    """Mean loss and accuracy over all of ``data``, each pair counted once.

    The shards may differ in length: the ranks add up sums and counts, never means.
    """
    mine = data.select(shard(len(data), get("ws"), get("rank")))
    collate_batch = functools.partial(collate, tokenizer=tokenizer)
    totals = torch.zeros(3, dtype=torch.float64, device=device())
    model.eval()
    for batch in DataLoader(mine, batch_size, collate_fn=collate_batch):
        batch = to_device(batch)
        output, labels = model(**batch), batch["labels"]
        correct = (output.logits.argmax(dim=-1) == labels).sum()
        totals += torch.stack(
            [output.loss * len(labels), correct, torch.ones_like(correct) * len(labels)]
        )
    dist.all_reduce(totals)
    loss_sum, correct_count, count = totals.tolist()
    return loss_sum / count, correct_count / count


def to_device(batch: Batch) -> Batch:
    """The batch on this rank's device."""
    return {name: tensor.to(device()) for name, tensor in batch.items()}


def clock() -> float:
    """Seconds, read once this rank's device has done all it was given."""
    if device().type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def start() -> None:
    """Starts the process group that torchrun describes, or a group of one; only rank 0 logs."""
    rank = int(os.environ.get("RANK", 0))
    if rank != 0:
        os.environ.update(TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1")
    logging.basicConfig(level=logging.ERROR if rank else logging.INFO, format="%(message)s")
    if "RANK" in os.environ:
        init_process_group()
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        init_process_group(store=store, rank=0, world_size=1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains with the options of the command line; bad data ends in one line and exit code 1."""
    options = parse_options(Options, "miniddp.train", __doc__, arguments)
    start()
    try:
        train(options)
    except DataError as error:
        sys.exit(f"miniddp.train: error: {error}")
    finally:
        destroy_process_group()


if __name__ == "__main__":
    main()
