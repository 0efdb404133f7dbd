"""The hub's cache is asked first, the hub for a moment, and who gets neither is told."""

import http.server
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import datasets
import huggingface_hub.constants as constants
import pytest
import transformers

from finetune import data, hub, model
from finetune.hub import Repository, from_hub, hub_problem

THING = Repository("someone/thing", "0" * 40, "model")


@pytest.fixture(autouse=True)
def nothing_is_known():
    hub_problem.cache_clear()
    yield
    hub_problem.cache_clear()


# In which order


def ask(monkeypatch, in_cache: object, problem: str | None, by_network: object) -> list[object]:
    """What `from_hub` gives, and each way that it tried; an error is raised there."""
    tried = []
    monkeypatch.setattr(hub, "hub_problem", lambda _: tried.append("hub") or problem)

    def load(local_files_only):
        tried.append("cache" if local_files_only else "network")
        found = in_cache if local_files_only else by_network
        if isinstance(found, Exception):
            raise found
        return found

    return [from_hub("thing", THING, load), *tried]


def test_what_is_in_the_cache_is_used_and_nobody_is_asked(monkeypatch, caplog):
    assert ask(monkeypatch, "cached", "no network", "fetched") == ["cached", "cache"]
    assert caplog.text == ""


@pytest.mark.parametrize("incomplete", [OSError("no weights"), ValueError("no tokenizer")])
def test_what_is_not_whole_in_the_cache_is_fetched(monkeypatch, incomplete, caplog):
    found = ask(monkeypatch, incomplete, None, "fetched")
    assert found == ["fetched", "cache", "hub", "network"]
    assert caplog.text == ""


def test_without_a_network_one_warning_says_what_is_missing(monkeypatch, caplog):
    found = ask(monkeypatch, OSError("no"), "no route\nto it", "fetched")
    assert found == [None, "cache", "hub"]
    (line,) = caplog.messages
    assert line == "no thing in the hub's cache here, nor from the hub: no route to it"


def test_a_hub_that_fails_after_it_answered_is_a_warning_too(monkeypatch, caplog):
    found = ask(monkeypatch, OSError("no"), None, ConnectionError("reset\nby peer"))
    assert found == [None, "cache", "hub", "network"]
    assert caplog.messages[0].endswith("nor from the hub: reset by peer")


# Whether the hub answers


@pytest.fixture
def answering(monkeypatch) -> Iterator[list[str]]:
    """A hub that knows everything; what it was asked for."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"id": THING.id, "sha": THING.revision}).encode())

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        point_to(monkeypatch, server.server_port)
        yield asked
        server.shutdown()


def point_to(monkeypatch, port: int) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def test_the_hub_is_asked_once_for_what_is_pinned(answering):
    assert [hub_problem(THING), hub_problem(THING)] == [None, None]
    # The hub's client may ask for other things too.
    asked = [path for path in answering if path.startswith("/api/models")]
    assert asked == [f"/api/models/{THING.id}/revision/{THING.revision}"]


def test_a_hub_that_nobody_reaches_is_a_problem(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    point_to(monkeypatch, port)
    assert "refused" in str(hub_problem(THING))


def test_a_hub_that_never_answers_is_given_up_and_not_asked_again(monkeypatch):
    monkeypatch.setattr(hub, "TIMEOUT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        point_to(monkeypatch, server.getsockname()[1])
        assert "timed out" in str(hub_problem(THING)).lower()
        server.accept()
        server.settimeout(0.5)
        with pytest.raises(TimeoutError):
            server.accept()


def test_offline_nobody_is_asked(monkeypatch, answering):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "offline" in str(hub_problem(THING)).lower()
    assert answering == []


# With a cache, as the hub's client lays it out


def snapshot(home: Path, repository: Repository) -> Path:
    name = f"{repository.kind}s--{repository.id.replace('/', '--')}"
    return home / "hub" / name / "snapshots" / repository.revision


def cache_model(home: Path) -> Path:
    """A small language model in the place of the published one, and its tokenizer."""
    folder = snapshot(home, model.MODEL)
    rows = data.read_sample("train")
    tokenizer = model.train_tokenizer([row["sentence1"] for row in rows], 700)
    tokenizer.save_pretrained(folder)
    config = model.build_model("tiny").config
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def cache_pairs(home: Path) -> Path:
    folder = snapshot(home, data.GLUE)
    rows = data.read_sample("train")
    parts = {"train": rows[10:], "validation": rows[:10], "test": data.read_sample("test")}
    for part, of_part in parts.items():
        path = folder / f"mrpc/{part}-00000-of-00001.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        datasets.Dataset.from_list(of_part[::-1]).to_parquet(path)
    return folder


# The hub's client may ask whose agent it works for, before it looks into its cache.
PROGRAM = """
import socket
def refuse(*args, **kwargs): raise OSError("Network is unreachable")
socket.socket.connect = socket.getaddrinfo = refuse
from finetune import last_words
from finetune.train import main
last_words.run(main)
"""


def train_without_network(home: Path, **environment: str) -> str:
    """The log of a training that may use no network; nothing says so to the hub's client."""
    arguments = ["--model=360m", "--steps=1", "--batch-size=4", "--max-length=16"]
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env={**inherited, "HF_HOME": str(home), "HOME": str(home), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stderr


@pytest.mark.parametrize("environment", [{}, {"HF_HUB_OFFLINE": "1"}], ids=["asks", "offline"])
def test_a_complete_cache_is_all_that_a_training_needs(tmp_path, environment):
    cache_model(tmp_path)
    cache_pairs(tmp_path)
    log = train_without_network(tmp_path, **environment)
    train, test = data.read_sample("train"), data.read_sample("test")
    assert f"train data from the hub: {len(train)} pairs" in log
    assert f"test data from the hub: {len(test)} pairs" in log
    assert f"tokenizer of {model.MODEL.id}: 700 tokens" in log
    assert f"model 360m: pretrained weights of {model.MODEL.id}" in log
    assert "in the hub's cache here, nor" not in log


def test_cached_rows_come_in_the_order_of_the_original_files(tmp_path, monkeypatch, caplog):
    cache_pairs(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    caplog.set_level(logging.INFO)
    pairs = data.load_mrpc()
    assert pairs.info.description == "train data from the hub", "recordings say it"
    loaded = pairs[:]
    rows = data.read_sample("train")
    assert loaded == {name: [row[name] for row in rows] for name in rows[0]}
    assert caplog.messages == [f"train data from the hub: {len(rows)} pairs"]


@pytest.mark.parametrize(
    ("cache", "missing"),
    [
        (cache_model, "model.safetensors"),
        (cache_model, "config.json"),
        (cache_model, "tokenizer.json"),
        (cache_pairs, "mrpc/validation-00000-of-00001.parquet"),
    ],
)
def test_a_cache_without_a_file_is_as_none(tmp_path, monkeypatch, caplog, cache, missing):
    folder = cache(tmp_path)
    (folder / missing).unlink()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub, "hub_problem", lambda _: "no network")
    monkeypatch.setitem(model.SIZES, "360m", model.SIZES["tiny"])
    if cache is cache_pairs:
        assert len(data.load_mrpc()) == len(data.read_sample("train"))
        what = "MRPC (nyu-mll/glue)"
    elif "tokenizer" in missing:
        model.load_tokenizer(["a b"], "360m")
        what = f"tokenizer of {model.MODEL.id}"
    else:
        model.load_model("360m")
        what = f"weights of {model.MODEL.id}"
    assert f"no {what} in the hub's cache here, nor from the hub: no network" in caplog.messages


def test_another_revision_in_the_cache_is_not_what_was_asked_for(tmp_path, monkeypatch, caplog):
    folder = cache_pairs(tmp_path)
    folder.rename(folder.with_name("1" * 40))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub, "hub_problem", lambda _: "no network")
    data.load_mrpc()
    assert "no MRPC (nyu-mll/glue) in the hub's cache here, nor" in caplog.text
