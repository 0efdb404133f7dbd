import logging
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from finetune import data
from finetune.data import Batches, DataError, collate, encode, load_mrpc
from finetune.model import train_tokenizer
from finetune.options import Options
from miniddp import DistributedSampler

HEADER = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
ROW = '1\t10\t11\tShe said "no" to him.\t"No," she told him.\n'


@pytest.fixture
def no_hub(monkeypatch):
    monkeypatch.setattr(data, "from_hub", lambda *_: None)


def write(folder: Path, train: str | bytes, test: str | bytes = HEADER + ROW) -> Path:
    for name, content in (("train", train), ("test", test)):
        content = content.encode() if isinstance(content, str) else content
        (folder / f"msr_paraphrase_{name}.txt").write_bytes(content)
    return folder


def test_sample_is_large_and_balanced_enough():
    rows = data.read_pairs(data.SAMPLE)
    sentences = [row[name] for row in rows for name in ("sentence1", "sentence2")]
    assert len(rows) >= 200
    assert 0.6 < sum(row["label"] for row in rows) / len(rows) < 0.72
    assert [text for text, count in Counter(sentences).items() if count > 1] == []
    assert {len(text.split()) for text in sentences} <= set(range(10, 26))


def test_sample_is_split_without_overlap(no_hub, caplog):
    caplog.set_level(logging.INFO)
    train, test = load_mrpc(split="train"), load_mrpc(split="test")
    assert train.info.description == "train data from miniddp's sample", "recordings say it"
    assert sorted(train[:]["idx"] + test[:]["idx"]) == list(range(len(train) + len(test)))
    assert 0.18 < len(test) / (len(train) + len(test)) < 0.22
    assert f"train data from miniddp's sample: {len(train)} pairs" in caplog.text


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_files_of_a_folder_keep_quotes_as_text(tmp_path, caplog, bom, end):
    caplog.set_level(logging.INFO)
    lone_quote = '0\t12\t13\tA 5" pipe\u2028burst.\tThe pipe\x85held.\n'
    content = (HEADER + ROW + lone_quote).encode().replace(b"\n", end)
    pairs = load_mrpc(write(tmp_path, bom + content))
    assert pairs.column_names == ["sentence1", "sentence2", "label", "idx"]
    assert pairs[0] == {
        "sentence1": 'She said "no" to him.',
        "sentence2": '"No," she told him.',
        "label": 1,
        "idx": 0,
    }
    assert pairs[1]["sentence1"] == 'A 5" pipe\u2028burst.'
    assert pairs[1]["sentence2"] == "The pipe\x85held."
    assert pairs[1]["label"] == 0
    source = tmp_path / "msr_paraphrase_train.txt"
    assert f"train data from {source}: 2 pairs" in caplog.text


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", ", line 1: expected the header"),
        (HEADER, ": expected rows after the header, found none"),
        (ROW, ", line 1: expected the header"),
        (
            HEADER + ROW + "1\t2\t3\tonly one\n",
            ", line 3: expected 5 tab-separated fields, found 4",
        ),
        (HEADER + ROW + "\n" + ROW, ", line 3: expected 5 tab-separated fields, found 1"),
        (HEADER + ROW.replace("1", "2", 1), ", line 2: expected the label 0 or 1, found '2'"),
        (
            HEADER + "1\t2\t3\t \tsome text\n",
            ", line 2: expected two sentences, found an empty one",
        ),
        (
            HEADER + ROW.replace("said", "said " + 2_500 * "word"),
            ", line 2: expected at most 10000 characters in a field, found more",
        ),
        (
            HEADER.encode() + b"1\t2\t3\tcaf\xe9\tcafe\n",
            ", line 2: expected UTF-8, found byte 0xe9",
        ),
    ],
)
def test_a_bad_file_is_named_with_what_was_expected_and_found(tmp_path, content, expected):
    with pytest.raises(DataError) as caught:
        load_mrpc(write(tmp_path, content))
    assert str(tmp_path / "msr_paraphrase_train.txt") + expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_missing_is_named(tmp_path):
    file = tmp_path / "msr_paraphrase_train.txt"
    with pytest.raises(DataError, match=f"{file}: cannot be read: No such file or directory"):
        load_mrpc(tmp_path)


def test_offline_mode_falls_back_to_the_sample_without_asking_the_network(tmp_path):
    program = (
        "import socket, finetune.data as data\n"
        "def refuse(*args): raise SystemExit('the network was used')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "print(len(data.load_mrpc()))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [str(len(data.read_sample("train")))]
    assert "no MRPC (nyu-mll/glue) in the hub's cache here, nor from the hub: " in run.stderr
    assert "offline mode is enabled" in run.stderr


def test_importing_the_modules_imports_neither_transformers_nor_datasets():
    program = (
        "import sys, miniddp, finetune.data, finetune.model, finetune.train\n"
        "print({'transformers', 'datasets', 'tokenizers'} & set(sys.modules))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert run.stdout.strip() == "set()", run.stderr


def test_batches_are_padded_to_the_longest_pair_and_a_multiple_of_eight(no_hub):
    pairs = load_mrpc()
    tokenizer = train_tokenizer(pairs[:]["sentence1"] + pairs[:]["sentence2"], 1024)
    encoded = encode(pairs, tokenizer, max_length=512)
    rows = [encoded[index] for index in range(7)]
    batch = collate(rows, tokenizer)
    lengths = [len(row["input_ids"]) for row in rows]
    width = batch["input_ids"].shape[1]
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    assert width % 8 == 0
    assert 0 <= width - max(lengths) < 8
    assert batch["attention_mask"].sum(dim=1).tolist() == lengths
    assert batch["labels"].tolist() == pairs[:]["label"][:7]
    for row, ids, length in zip(rows, batch["input_ids"].tolist(), lengths, strict=True):
        assert ids[:length] == row["input_ids"]
        assert set(ids[length:]) <= {tokenizer.pad_token_id}
    text = tokenizer.decode(rows[0]["input_ids"])
    assert text == f"{pairs[0]['sentence1']}\n{pairs[0]['sentence2']}"


def test_long_pairs_are_cut(no_hub):
    pairs = load_mrpc(split="test")
    tokenizer = train_tokenizer(pairs[:]["sentence1"], 512)
    assert {len(ids) for ids in encode(pairs, tokenizer, max_length=10)[:]["input_ids"]} == {10}


class Noise(torch.utils.data.Dataset):
    """Each sample draws a random number, as augmentation would."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.rand(()).item()


def noisy(monkeypatch, workers: int, rank: int = 0) -> Batches:
    """A rank's two micro-batches a step, three steps an epoch, without the other rank."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    loader = DataLoader(
        Noise(),
        batch_size=1,
        sampler=DistributedSampler(Noise(), 2, rank),
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
        generator=torch.Generator().manual_seed(rank),
    )
    return Batches(loader, Options(batch_size=2, accumulation=2, epochs=3))


def drawn(batches: Batches, steps: int) -> list[list[float]]:
    return [[batch.item() for batch in next(batches)] for _ in range(steps)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("taken", range(10))
def test_augmentation_goes_on_with_the_numbers_that_would_have_come(monkeypatch, workers, taken):
    torch.manual_seed(1)
    straight = noisy(monkeypatch, workers)
    drawn(straight, taken)
    place, numbers = straight.state_dict(), torch.get_rng_state()
    expected = drawn(straight, 9 - taken)
    resumed = noisy(monkeypatch, workers)
    resumed.load_state_dict(place)
    torch.set_rng_state(numbers)  # as a checkpoint does, after the objects
    assert resumed.steps_left() == 9 - taken
    assert drawn(resumed, 9 - taken) == expected


def test_workers_draw_other_numbers_in_each_epoch_and_on_each_rank(monkeypatch):
    numbers = [
        number
        for rank in range(2)
        for step in drawn(noisy(monkeypatch, 2, rank), 9)
        for number in step
    ]
    assert len(set(numbers)) == 2 * 9 * 2
