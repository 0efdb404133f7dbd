"""Pairs of sentences that mean the same or not: MRPC, or a small sample of the same form."""

import functools
import logging
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from datasets import Dataset

DATASET_ID = "nyu-mll/glue"
DATASET_REVISION = "bcdcba79d07bc864c1c254ccfcedcce55bcc9a8c"
COLUMNS = ("Quality", "#1 ID", "#2 ID", "#1 String", "#2 String")
LABELS = ("not_equivalent", "equivalent")
FILES = {"train": "msr_paraphrase_train.txt", "test": "msr_paraphrase_test.txt"}
HUB_SPLITS = {"train": "train+validation", "test": "test"}
SAMPLE = Path(__file__).with_name("sample.tsv")
SAMPLE_TEST_EVERY = 5
HUB_TIMEOUT_SECONDS = 5.0

logger = logging.getLogger(__name__)
T = TypeVar("T")


class DataError(ValueError):
    """Data that cannot be used: one line that says where, what was expected and what was found."""


def load_mrpc(data_dir: str | Path | None = None, split: str = "train") -> "Dataset":
    """The sentence pairs of ``split`` ("train" or "test"), with the source in one log line.

    The first source that applies: the original files in ``data_dir``; the hub, at a pinned
    revision; the sample that comes with the package. All give the columns ``sentence1``,
    ``sentence2``, ``label`` (1: same meaning) and ``idx`` (the row's place in the original file).
    MRPC itself has 4076 training and 1725 test rows: the hub's validation rows are training rows
    of the original files, and are put back among them.

    Raises:
        DataError: ``data_dir`` lacks the file of this split, or the file is malformed.
        ValueError: ``split`` is neither "train" nor "test".
    """
    if split not in FILES:
        raise ValueError(f"split must be one of {', '.join(FILES)}, got {split!r}")
    if data_dir is not None:
        path = find_file(Path(data_dir), split)
        return to_dataset(read_pairs(path), f"{split} data from {path}")
    data = from_hub(f"MRPC ({DATASET_ID})", lambda: load_from_hub(split))
    if data is not None:
        logger.info("%s data from the hub: %d pairs of %s", split, len(data), DATASET_ID)
        return data
    return to_dataset(read_sample(split), f"{split} data from the sample that comes with miniddp")


def find_file(data_dir: Path, split: str) -> Path:
    """The file of ``split`` in a folder with the original MRPC files."""
    path = data_dir / FILES[split]
    if path.is_file():
        return path
    problem = "not found in this folder" if data_dir.is_dir() else "there is no such folder"
    raise DataError(f"{data_dir}: {problem}; looked for {' and '.join(FILES.values())}")


def read_pairs(path: Path) -> list[dict[str, Any]]:
    """The rows of a file in MRPC's form: a header, then tab-separated rows without any quoting."""
    try:
        lines = path.read_bytes().decode("utf-8-sig").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        byte = error.object[error.start]
        raise DataError(f"{path}, line {line}: expected UTF-8, found byte {byte:#x}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    if lines == [""]:
        raise DataError(f"{path}: expected a header and rows, found an empty file")
    header = tuple(lines[0].rstrip("\r").split("\t"))
    if header != COLUMNS:
        raise DataError(f"{path}, line 1: expected the header {COLUMNS}, found {header}")
    if len(lines) == 1:
        raise DataError(f"{path}: expected rows after the header, found none")
    return [
        {**parse_row(line, f"{path}, line {index + 2}"), "idx": index}
        for index, line in enumerate(lines[1:])
    ]


def parse_row(line: str, where: str) -> dict[str, Any]:
    """One row as sentence1, sentence2 and label."""
    fields = line.rstrip("\r").split("\t")
    if len(fields) != len(COLUMNS):
        raise DataError(
            f"{where}: expected {len(COLUMNS)} tab-separated fields, found {len(fields)}"
        )
    label, _, _, sentence1, sentence2 = fields
    if label not in ("0", "1"):
        raise DataError(f"{where}: expected the label 0 or 1, found {label!r}")
    if not sentence1.strip() or not sentence2.strip():
        raise DataError(f"{where}: expected two sentences, found an empty one")
    return {"sentence1": sentence1, "sentence2": sentence2, "label": int(label)}


def read_sample(split: str) -> list[dict[str, Any]]:
    """The bundled sample: every fifth row is for testing, the others are for training."""
    return [
        row
        for row in read_pairs(SAMPLE)
        if (row["idx"] % SAMPLE_TEST_EVERY == SAMPLE_TEST_EVERY - 1) == (split == "test")
    ]


def to_dataset(rows: list[dict[str, Any]], source: str) -> "Dataset":
    """Rows as a ``datasets.Dataset`` with the features that MRPC has on the hub."""
    from datasets import ClassLabel, Dataset, Features, Value

    features = Features(
        {
            "sentence1": Value("string"),
            "sentence2": Value("string"),
            "label": ClassLabel(names=list(LABELS)),
            "idx": Value("int32"),
        }
    )
    logger.info("%s: %d pairs", source, len(rows))
    return Dataset.from_list(rows, features=features)


def load_from_hub(split: str) -> "Dataset":
    """MRPC from the hub, or from its cache on this machine."""
    from datasets import load_dataset

    data = load_dataset(DATASET_ID, "mrpc", revision=DATASET_REVISION, split=HUB_SPLITS[split])
    return data.sort("idx")


def from_hub(what: str, load: Callable[[], T]) -> T | None:
    """``load()``, or None with a warning in the log when the hub cannot give ``what``.

    With ``HF_HUB_OFFLINE`` set only the cache is looked at. Otherwise the hub has to answer within
    5 seconds, so that a machine without network does not wait through its retries.
    """
    problem = hub_problem()
    if problem is None:
        try:
            return load()
        except OSError as error:
            problem = str(error)
    logger.warning("no %s from the hub: %s", what, " ".join(problem.split())[:200])
    return None


@functools.cache
def hub_problem() -> str | None:
    """Why the hub cannot be asked; None when it answers or its cache is to be used."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return None
    request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=HUB_TIMEOUT_SECONDS).close()
    except OSError as error:
        return f"{constants.ENDPOINT} does not answer ({error})"
    return None


def encode(data: "Dataset", tokenizer: Any, max_length: int) -> "Dataset":
    """Each pair as ``input_ids`` (both sentences, a line break between) and ``labels``.

    Args:
        max_length: Tokens of a pair after which the rest is cut off.
    """
    from datasets import Dataset

    rows = data[:]
    pairs = zip(rows["sentence1"], rows["sentence2"], strict=True)
    texts = [f"{sentence1}\n{sentence2}" for sentence1, sentence2 in pairs]
    tokens = tokenizer(texts, truncation=True, max_length=max_length)["input_ids"]
    return Dataset.from_dict({"input_ids": tokens, "labels": rows["label"]})


def collate(rows: Sequence[Mapping[str, Any]], tokenizer: Any) -> dict[str, torch.Tensor]:
    """Rows as one batch, padded to the longest of them and on to a multiple of 8.

    Returns:
        ``input_ids`` and ``attention_mask``, both (rows, tokens), and ``labels``, (rows,): int64.
    """
    batch = tokenizer.pad(list(rows), padding="longest", pad_to_multiple_of=8, return_tensors="pt")
    return dict(batch)
