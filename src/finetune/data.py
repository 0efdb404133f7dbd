"""MRPC, pairs of sentences that mean the same or not, as batches of a rank."""

import functools
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from finetune.hub import Repository, from_hub
from finetune.job import check_alike, succeed_together
from finetune.model import load_tokenizer
from finetune.options import Options
from miniddp.process import device
from miniddp.sampler import DistributedSampler

if TYPE_CHECKING:
    from datasets import Dataset

GLUE = Repository("nyu-mll/glue", "bcdcba79d07bc864c1c254ccfcedcce55bcc9a8c", "dataset")
HUB_SPLITS = {"train": ["train", "validation"], "test": ["test"]}
FILES = {
    "train": "msr_paraphrase_train.txt",
    "test": "msr_paraphrase_test.txt",
}
LONGEST = 10_000  # characters; a longer one stalls the tokenizer
COLUMNS = ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"]
SAMPLE = Path(__file__).with_name("sample.tsv")

logger = logging.getLogger(__name__)
Batch = dict[str, torch.Tensor]
Row = dict[str, Any]


class DataError(ValueError):
    """Data that cannot be used: where, what was expected, what was found."""


def load_mrpc(
    data_dir: str | Path | None = None,
    split: str = "train",
) -> "Dataset":
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
    load = functools.partial(read_hub, split)
    rows = from_hub(f"MRPC ({GLUE.id})", GLUE, load)
    if rows is not None:
        return to_dataset(rows, f"{split} data from the hub")
    return to_dataset(read_sample(split), f"{split} data from miniddp's sample")


def read_pairs(path: Path) -> list[Row]:
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
    lines = [line.rstrip("\r") for line in text.split("\n")]
    header, *rows = [line.split("\t") for line in lines]
    if header != COLUMNS:
        found = f"expected the header {COLUMNS}, found {header}"
        raise DataError(f"{path}, line 1: {found}"[:300])
    if not rows:
        raise DataError(f"{path}: expected rows after the header, found none")
    return [parse_row(path, index, row) for index, row in enumerate(rows)]


def parse_row(path: Path, index: int, fields: list[str]) -> Row:
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
    return {
        "sentence1": fields[3],
        "sentence2": fields[4],
        "label": int(fields[0]),
        "idx": index,
    }


def read_hub(split: str, local_files_only: bool) -> list[Row]:
    """The rows from the hub, or from its cache, in the order of the files.

    By file: `load_dataset` goes on without a network only where it has been
    called before, and then with any revision.
    """
    from huggingface_hub import hf_hub_download
    from pyarrow.parquet import read_table  # type: ignore[import-untyped]

    rows: list[Row] = []
    for part in HUB_SPLITS[split]:
        path = hf_hub_download(
            GLUE.id,
            f"mrpc/{part}-00000-of-00001.parquet",
            repo_type=GLUE.kind,
            revision=GLUE.revision,
            local_files_only=local_files_only,
        )
        rows += read_table(path).to_pylist()
    return sorted(rows, key=itemgetter("idx"))


def read_sample(split: str) -> list[Row]:
    """The sample: every fifth row to test, the others to train."""
    kept = {"train": (0, 1, 2, 3), "test": (4,)}[split]
    return [row for row in read_pairs(SAMPLE) if row["idx"] % 5 in kept]


def to_dataset(rows: list[Row], source: str) -> "Dataset":
    from datasets import Dataset, DatasetInfo

    logger.info("%s: %d pairs", source, len(rows))
    return Dataset.from_list(rows, info=DatasetInfo(description=source))


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

    def load() -> tuple["Dataset", "Dataset"]:
        train = load_mrpc(options.data_dir, "train")
        test = load_mrpc(options.data_dir, "test")
        return train, test

    train, test = succeed_together(load, DataError)
    world_size = dist.get_world_size()
    joined = world_size * options.batch_size
    if len(train) < joined:
        raise DataError(
            f"{world_size} ranks x batch size {options.batch_size} need {joined}"
            f" training pairs in each step, found {len(train)}: use fewer "
            "ranks or smaller batches"
        )
    rows = train[:]
    sentences = rows["sentence1"] + rows["sentence2"]
    tokenizer = load_tokenizer(sentences, options.model, options.pretrained)
    train = encode(train, tokenizer, options.max_length)
    test = encode(test, tokenizer, options.max_length)
    text = json.dumps([train[:], test[:]])
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    check_alike({"SHA-256 of the pairs' tokens": digest}, DataError)
    return train, test, tokenizer, digest


def build_loader(
    data: "Dataset",
    tokenizer: Any,
    options: Options,
) -> DataLoader[Any]:
    """This rank's micro-batches of an epoch, in an order that all ranks share.

    Rank r of n takes every n-th of the shuffled pairs, so step k joins the k-th
    run of `n x batch_size` pairs: the batch that one process would take.
    """
    seed = options.seed + dist.get_rank()
    return DataLoader(
        cast(Any, data),
        batch_size=options.batch_size // options.accumulation,
        sampler=DistributedSampler(data, seed=options.seed, drop_last=True),
        collate_fn=functools.partial(collate, tokenizer=tokenizer),
        drop_last=True,
        pin_memory=device().type == "cuda",
        generator=torch.Generator().manual_seed(seed),  # for its workers
    )


class Batches:
    """The micro-batches of each step, and a place in them to resume from.

    Each epoch has an order of its own, and its workers random numbers of their
    own. A resume reads the steps of its epoch again that are taken: so workers
    that draw numbers, to augment, go on with those that would have come. With
    another number of workers, or persistent ones, they do not.
    """

    def __init__(self, loader: DataLoader[Any], options: Options) -> None:
        assert loader.generator is not None
        self.loader = loader
        self.accumulation = options.accumulation
        self.epochs = options.epochs
        self.joined = dist.get_world_size() * options.batch_size
        self.seed = loader.generator.initial_seed()
        self.epoch = 0
        self.steps = 0  # taken of this epoch

    @property
    def steps_per_epoch(self) -> int:
        """What does not fill a step is left out, for that epoch."""
        return len(self.loader) // self.accumulation

    def steps_left(self) -> int:
        return self.steps_per_epoch * (self.epochs - self.epoch) - self.steps

    def __next__(self) -> list[Batch]:
        if self.steps == 0:
            self._begin_epoch()
        step = [next(self._micro_batches) for _ in range(self.accumulation)]
        self.steps += 1
        self._end_epoch_if_over()
        return step

    def _begin_epoch(self) -> None:
        cast(DistributedSampler, self.loader.sampler).set_epoch(self.epoch)
        seed = self.seed + self.epoch * dist.get_world_size()
        cast(torch.Generator, self.loader.generator).manual_seed(seed)
        self._micro_batches = iter(self.loader)

    def _end_epoch_if_over(self) -> None:
        if self.steps >= self.steps_per_epoch:
            self.epoch += 1
            self.steps = 0

    def state_dict(self) -> dict[str, int]:
        """The same on every rank; `pairs`: of this epoch, of all ranks."""
        return {"epoch": self.epoch, "pairs": self.steps * self.joined}

    def load_state_dict(self, saved: Mapping[str, int]) -> None:
        """Go on after the last joined batch of these ranks that is whole."""
        self.epoch = saved["epoch"]
        self.steps = 0
        steps = saved["pairs"] // self.joined
        for _ in range(min(steps, self.steps_per_epoch)):
            next(self)


def to_device(batch: Batch) -> Batch:
    """The batch on this rank's device; from pinned memory without waiting."""
    rank_device = device()
    return {
        name: tensor.to(rank_device, non_blocking=True)
        for name, tensor in batch.items()
    }
