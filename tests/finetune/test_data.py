import http.server
import logging
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import datasets
import huggingface_hub.constants
import pytest

from finetune import data, model
from finetune.data import DataError, collate, encode, load_mrpc
from finetune.model import from_hub, hub_problem, train_tokenizer

HEADER = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
ROW = '1\t10\t11\tShe said "no" to him.\t"No," she told him.\n'


@pytest.fixture
def no_hub(monkeypatch):
    monkeypatch.setattr(model, "hub_problem", lambda: "there is no network in this test")


@pytest.fixture
def hub_answers(monkeypatch):
    monkeypatch.setattr(model, "hub_problem", lambda: None)


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
    assert sorted(train[:]["idx"] + test[:]["idx"]) == list(range(len(train) + len(test)))
    assert 0.18 < len(test) / (len(train) + len(test)) < 0.22
    assert "no network in this test" in caplog.text
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


def test_hub_gives_the_pinned_revision_in_the_order_of_the_original_files(monkeypatch, hub_answers):
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((*args, kwargs["revision"], kwargs["split"]))
        rows = [{"sentence1": "a", "sentence2": "b", "label": 1, "idx": idx} for idx in (2, 0, 1)]
        return datasets.Dataset.from_list(rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_mrpc()[:]["idx"] == [0, 1, 2]
    assert asked == [("nyu-mll/glue", "mrpc", data.DATASET_REVISION, "train+validation")]


def test_a_hub_that_fails_after_it_answered_gives_none_and_the_reason(hub_answers, caplog):
    def load():
        raise ConnectionError("reset\nby peer")

    assert from_hub("thing", load) is None
    assert "no thing from the hub: reset by peer" in caplog.text


def test_hub_problem_asks_the_hub_once(monkeypatch):
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        hub_problem.cache_clear()
        assert hub_problem() is None
        assert hub_problem() is None
        server.shutdown()
    hub_problem.cache_clear()
    assert f"{address} does not answer" in str(hub_problem())
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    hub_problem.cache_clear()
    assert hub_problem() is None
    hub_problem.cache_clear()
    assert asked == ["/"]


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
    assert "no MRPC (nyu-mll/glue) from the hub" in run.stderr


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
