"""MRPC, pairs of sentences that mean the same or not, as batches of a rank."""

import functools
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import DataLoader

from finetune.job import check_alike, succeed_together
from finetune.model import from_hub, load_tokenizer
from finetune.options import Options
from miniddp.process import device, get
from miniddp.sampler import DistributedSampler

if TYPE_CHECKING:
    from datasets import Dataset

DATASET_ID = "nyu-mll/glue"
DATASET_REVISION = "bcdcba79d07bc864c1c254ccfcedcce55bcc9a8c"
HUB_SPLITS = {"train": "train+validation", "test": "test"}
FILES = {s: f"msr_paraphrase_{s}.txt" for s in HUB_SPLITS}
LONGEST = 10_000  # characters; a longer one stalls the tokenizer
COLUMNS = ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"]
SAMPLE = Path(__file__).with_name("sample.tsv")

logger = logging.getLogger(__name__)
Batch = dict[str, torch.Tensor]


class DataError(ValueError):
    """Data that cannot be used: where, what was expected, what was found."""


def load_mrpc(data_dir: str | Path | None = None, split: str = "train") -> "Dataset":
    """The pairs of `split` ("train" or "test"); a log line names the source.

    The original files in `data_dir`, or the hub at a pinned revision, or the
    sample that comes with the package. All have `sentence1`, `sentence2`,
    `label` (1: same meaning) and `idx`, the row's place in the original file,
    of which there are 4076 to train and 1725 to test: the hub's validation
    rows are put back among the training rows.

    Raises `DataError` for a file that is missing or malformed.
    """
    if data_dir is not None:
        path = Path(data_dir) / FILES[split]
        return to_dataset(read_pairs(path), f"{split} data from {path}")
    data = from_hub(f"MRPC ({DATASET_ID})", lambda: load_from_hub(split))
    if data is not None:
        logger.info("%s data from the hub: %d pairs", split, len(data))
        return data
    return to_dataset(read_sample(split), f"{split} data from miniddp's sample")


def read_pairs(path: Path) -> list[dict[str, Any]]:
    """The rows of a file: a header, then tab-separated rows without quoting."""
    try:
        text = path.read_bytes().decode("utf-8-sig").removesuffix("\n")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        found = f"expected UTF-8, found byte {error.object[error.start]:#x}"
        raise DataError(f"{path}, line {line}: {found}") from error
    except OSError as error:
        reason = f"{path}: cannot be read: {error.strerror}"
        raise DataError(reason) from error
    header, *rows = [x.rstrip("\r").split("\t") for x in text.split("\n")]
    if header != COLUMNS:
        found = f"expected the header {COLUMNS}, found {header}"
        raise DataError(f"{path}, line 1: {found}"[:300])
    if not rows:
        raise DataError(f"{path}: expected rows after the header, found none")
    return [parse_row(path, index, row) for index, row in enumerate(rows)]


def parse_row(path: Path, index: int, fields: list[str]) -> dict[str, Any]:
    problem = None
    if len(fields) != len(COLUMNS):
        problem = f"5 tab-separated fields, found {len(fields)}"
    elif fields[0] not in ("0", "1"):
        problem = f"the label 0 or 1, found {fields[0][:40]!r}"
    elif not fields[3].strip() or not fields[4].strip():
        problem = "two sentences, found an empty one"
    elif len(max(fields, key=len)) > LONGEST:
        problem = f"at most {LONGEST} characters in a field, found more"
    if problem:
        raise DataError(f"{path}, line {index + 2}: expected {problem}")
    label, _, _, first, second = fields
    row = {"sentence1": first, "sentence2": second}
    return {**row, "label": int(label), "idx": index}


def read_sample(split: str) -> list[dict[str, Any]]:
    """The sample: every fifth row to test, the others to train."""
    kept = {"train": (0, 1, 2, 3), "test": (4,)}[split]
    return [row for row in read_pairs(SAMPLE) if row["idx"] % 5 in kept]


def to_dataset(rows: list[dict[str, Any]], source: str) -> "Dataset":
    from datasets import Dataset

    logger.info("%s: %d pairs", source, len(rows))
    return Dataset.from_list(rows)


def load_from_hub(split: str) -> "Dataset":
    """MRPC from the hub, or from its cache on this machine."""
    from datasets import load_dataset

    where = {"revision": DATASET_REVISION, "split": HUB_SPLITS[split]}
    return load_dataset(DATASET_ID, "mrpc", **where).sort("idx")


def encode(data: "Dataset", tokenizer: Any, max_length: int) -> "Dataset":
    """Each pair as `input_ids`, of at most `max_length` tokens, and `labels`.

    `input_ids` are both sentences, with a line break between them.
    """
    from datasets import Dataset

    rows = data[:]
    pairs = zip(rows["sentence1"], rows["sentence2"], strict=True)
    texts = [f"{first}\n{second}" for first, second in pairs]
    encoded = tokenizer(texts, truncation=True, max_length=max_length)
    columns = {"input_ids": encoded["input_ids"], "labels": rows["label"]}
    return Dataset.from_dict(columns)


def collate(rows: Sequence[Mapping[str, Any]], tokenizer: Any) -> Batch:
    """One batch, padded to its longest row and on to a multiple of 8.

    `input_ids` and `attention_mask`, (rows, tokens), and `labels`, (rows,); all
    int64.
    """
    padding: dict[str, Any] = {"padding": "longest", "pad_to_multiple_of": 8}
    return dict(tokenizer.pad(list(rows), return_tensors="pt", **padding))


def load_data(options: Options) -> tuple["Dataset", "Dataset", Any, str]:
    """Encoded pairs to train and test, their tokenizer, and their SHA-256.

    Raises `DataError` on every rank if one cannot use its data, if they differ,
    or if they do not fill one joined batch.
    """
    load = functools.partial(load_mrpc, options.data_dir)
    found = succeed_together(lambda: [load(s) for s in FILES], DataError)
    joined, rows = get("ws") * options.batch_size, found[0][:]
    if len(found[0]) < joined:
        raise DataError(
            f"{get('ws')} ranks x batch size {options.batch_size} need {joined}"
            f" training pairs in each step, found {len(found[0])}: use fewer "
            "ranks or smaller batches"
        )
    sentences = rows["sentence1"] + rows["sentence2"]
    tokenizer = load_tokenizer(sentences, options.model, options.pretrained)
    train, test = (encode(d, tokenizer, options.max_length) for d in found)
    text = json.dumps([train[:], test[:]])
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    check_alike({"SHA-256 of the pairs' tokens": digest}, DataError)
    return train, test, tokenizer, digest


def build_loader(data: "Dataset", tokenizer: Any, options: Options) -> DataLoader[Any]:
    """This rank's micro-batches of an epoch, in an order that all ranks share.

    Rank r of n takes every n-th of the shuffled pairs, so step k joins the k-th
    run of `n x batch_size` pairs: the batch that one process would take.
    """
    return DataLoader(
        cast(Any, data),
        batch_size=options.batch_size // options.accumulation,
        sampler=DistributedSampler(data, seed=options.seed, drop_last=True),
        collate_fn=functools.partial(collate, tokenizer=tokenizer),
        drop_last=True,
        pin_memory=device().type == "cuda",
        # Its own generator: it draws none of training's numbers.
        generator=torch.Generator().manual_seed(options.seed + get("rank")),
    )


def batches(loader: DataLoader[Any], options: Options) -> Iterator[tuple[Batch, ...]]:
    """The micro-batches of each step, every epoch in an order of its own.

    Starts where the loader's sampler stands. What does not fill a step is left
    out, for that epoch.
    """
    sampler = cast(DistributedSampler, loader.sampler)
    for epoch in range(sampler.epoch, options.epochs):
        sampler.set_epoch(epoch)
        micro_batches = iter(loader)
        yield from zip(*[micro_batches] * options.accumulation, strict=False)


def steps_left(loader: DataLoader[Any], options: Options) -> int:
    """How many steps `batches` gives, from where the sampler stands."""
    sampler = cast(DistributedSampler, loader.sampler)
    in_all = len(loader) // options.accumulation
    in_all *= options.epochs - sampler.epoch
    return in_all - sampler.consumed // options.batch_size


class Place:
    """Where the ranks are in the data, however many they are.

    The ranks read their joined batches from the same order, one after another.
    So with other ranks they go on after the last joined batch that is whole.
    """

    def __init__(self, sampler: Any, batch_size: int) -> None:
        self.sampler, self.batch_size = sampler, batch_size

    def state_dict(self) -> dict[str, Any]:
        return dict(self.sampler.state_dict())

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        ranks = self.sampler.num_replicas
        steps = saved["consumed"] * saved["num_replicas"] // ranks
        steps //= self.batch_size
        place = {"consumed": steps * self.batch_size, "num_replicas": ranks}
        self.sampler.load_state_dict({**saved, **place})


def to_device(batch: Batch) -> Batch:
    """The batch on this rank's device; from pinned memory without waiting."""
    here = device()
    return {k: v.to(here, non_blocking=True) for k, v in batch.items()}
