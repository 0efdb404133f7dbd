"""Hostile input to every parser of ours: an error of one line that says where, and nothing else.

No traceback, no code executed, and at most 200 characters of the input in the message.
"""

import copy
import json
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import pypandoc
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import check
from finetune.data import COLUMNS, DataError, read_pairs
from finetune.options import Options, OptionsError, flag, parse_options
from finetune.state_file import CheckpointError, read_state, write_state
from instruments import measurements
from miniddp.launch import run_ranks

ROOT = Path(__file__).parents[2]
QUOTED = 200  # characters of the input
OWN = 400  # of ours, such as the names of options; the path is not counted

few = settings(
    max_examples=100,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
texts = st.one_of(
    st.text(max_size=30),
    st.text("0123456789eE+-._xinfa", max_size=30),
    st.text(st.characters(), min_size=1, max_size=3).map(lambda text: text * 10_000),
    st.sampled_from(
        ["", "0", "-1", "1e400", "nan", "9" * 5000, "\0", "\ud800", "a\nb", "٣", "1_0"]
    ),
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=10)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=10), inner, max_size=3)
    ),
    max_leaves=10,
)


def refused(kind, parse, *arguments, where="") -> str:
    """What is wrong with the arguments, if anything, and not too much of them."""
    try:
        parse(*arguments)
    except kind as error:
        text = str(error)
    else:
        return ""
    assert len(text.replace(str(where), "")) <= QUOTED + OWN
    return text


# The command line

FLAGS = [flag(name) for name in vars(Options())]
arguments = st.lists(
    st.one_of(
        st.builds("{}={}".format, st.sampled_from(FLAGS), texts), st.sampled_from(FLAGS), texts
    ).filter(lambda text: not text.startswith(("-h", "--h"))),
    max_size=4,
)


@few
@given(arguments)
def test_options(given):
    refused(OptionsError, parse_options, given)


def test_a_job_says_one_line_that_every_terminal_shows(tmp_path):
    """An argument of a shell may hold any bytes: Python has them as half characters."""

    def say(rank):
        from finetune import last_words

        for number, line in enumerate(["--\udcff", "a\nb\tc", "x" * 10**6]):
            folder = tmp_path / str(number) / "0" / "0"
            folder.mkdir(parents=True)
            os.environ["TORCHELASTIC_ERROR_FILE"] = str(folder / "error.json")
            last_words.say_once(line)
            assert json.loads((folder / "error.json").read_text())["message"]["message"]
            yield (tmp_path / str(number) / "last_words").read_text()

    (said,) = run_ranks(lambda rank: list(say(rank)), 1)
    assert said == ["--\\udcff", "a b c", "x" * 1000]


# The pairs


@few
@given(st.one_of(st.binary(max_size=300), st.text(max_size=300).map(lambda t: t.encode("utf-16"))))
def test_bytes_for_pairs(tmp_path, content):
    refuses_pairs(tmp_path, content)


@few
@given(st.lists(st.one_of(texts, st.just("\t"), st.just("\n"), st.just("1")), max_size=12))
def test_rows_of_pairs(tmp_path, parts):
    header = "\t".join(COLUMNS)
    refuses_pairs(tmp_path, f"{header}\n{''.join(parts)}".encode(errors="replace"))


def refuses_pairs(folder, content):
    path = folder / "pairs.tsv"
    path.write_bytes(content)
    problem = refused(DataError, read_pairs, path, where=path)
    assert not problem or problem.startswith(f"{path}")


# Checkpoints


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "state"
    write_state(path, {"a": torch.arange(6.0), "b": [1, (2.0, None)], "c": {"d": "e"}})
    return path.read_bytes()


def refuses_state(folder, content):
    path = folder / "state"
    path.write_bytes(content)
    assert refused(CheckpointError, read_state, path, where=path)


@few
@given(st.data())
def test_damaged_checkpoints(tmp_path, saved, data):
    content = bytearray(saved)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.integers(0, 255))
    if content != saved:
        refuses_state(tmp_path, bytes(content))


@few
@given(st.one_of(st.binary(max_size=100), st.binary(min_size=8, max_size=8).map(lambda b: b * 99)))
def test_foreign_checkpoints(tmp_path, content):
    refuses_state(tmp_path, content)


@few
@given(st.one_of(values.map(json.dumps), texts.filter(lambda text: text.isascii())))
def test_headers_of_checkpoints(tmp_path, structure):
    """With a SHA-256 that is right: who writes a header can compute that too."""
    from finetune.state_file import _digest

    tensors = {"a": torch.zeros(2)}
    path = tmp_path / "state"
    safetensors.torch.save_file(tensors, path, {"state": _digest(structure, tensors) + structure})
    refused(CheckpointError, read_state, path, where=path)


@pytest.mark.parametrize("structure", ["[" * 100_000, '{"dict": ' * 50_000, '{"tensor": "b"}'])
def test_headers_that_are_deep_or_name_what_is_not_there(tmp_path, structure):
    from finetune.state_file import _digest

    path = tmp_path / "state"
    header = {"state": _digest(structure, {}) + structure}
    safetensors.torch.save_file({}, path, header)
    refuses_state(tmp_path, path.read_bytes())


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("save", [pickle.dump, torch.save])
def test_a_pickle_is_not_executed(tmp_path, save):
    with (tmp_path / "pickle").open("wb") as file:
        save(Hostile(tmp_path / "executed"), file)
    refuses_state(tmp_path, (tmp_path / "pickle").read_bytes())
    assert not (tmp_path / "executed").exists()


# Recordings


def refuses_recording(folder, content):
    path = folder / "05-ring.cpu.ipynb"
    path.write_text(content, errors="surrogatepass")
    refused(check.BadRecording, check.read_recording, path)


@few
@given(st.one_of(texts, values.map(json.dumps), st.just("[" * 100_000)))
def test_recordings(tmp_path, content):
    refuses_recording(tmp_path, content)


RECORDING = json.loads((ROOT / "recordings/05-ring.cpu.ipynb").read_text())
RECORDING["cells"] = RECORDING["cells"][:2]
WHERE = [("metadata",), ("cells",), ("metadata", "miniddp")]
WHERE += [("metadata", "miniddp", key) for key in (*check.METADATA, "accepted")]


@few
@given(st.sampled_from(WHERE), st.one_of(values, texts))
def test_recordings_of_which_a_part_is_another(tmp_path, where, value):
    notebook = copy.deepcopy(RECORDING)
    part = notebook
    for key in where[:-1]:
        part = part[key]
    part[where[-1]] = value
    refuses_recording(tmp_path, json.dumps(notebook))


# Measurements

SOURCE = '[t]\n{}\n[columns]\nsize = "size (bytes)"\nname = "name"\n'
ENTRY = "\n".join(f'{key} = "https://a"' for key in measurements.NEEDED) + '\nread = "original"'


@few
@given(st.one_of(st.lists(texts, max_size=5).map("".join), texts.map("size,name\n{},1\n".format)))
def test_tables_of_measurements(tmp_path, content):
    (tmp_path / "sources.toml").write_text(SOURCE.format(ENTRY))
    (tmp_path / "t.csv").write_text(content, errors="replace")
    refuses_table(tmp_path)


@few
@given(st.one_of(texts, values.map(json.dumps).map("t = {}\ncolumns = {{}}".format)))
def test_sources_of_measurements(tmp_path, content):
    (tmp_path / "sources.toml").write_text(content, errors="replace")
    (tmp_path / "t.csv").write_text("size,name\n1,a\n")
    refuses_table(tmp_path)


def refuses_table(folder):
    refused(ValueError, measurements.read, "t", folder)


# Symbols that a page quotes: Lua reads the Python

names = st.one_of(st.text(max_size=20), st.sampled_from(["f.", ".f", "%", "[", "f%d", "(" * 500]))


@settings(few, max_examples=5)
@given(st.lists(st.tuples(texts, names), min_size=40, max_size=40))
def test_symbols_of_quotes(cases):
    cases = [[part.encode(errors="replace").decode() for part in case] for case in cases]
    script = ROOT / "tests/book/extension/quote.lua"
    command = [pypandoc.get_pandoc_path(), "lua", script, ROOT / "_extensions/ddp-book"]
    done = subprocess.run(
        command, input=json.dumps(cases), capture_output=True, encoding="utf-8", timeout=60
    )
    assert done.returncode == 0, done.stderr
    for quotes in json.loads(done.stdout):
        for quote in quotes.values():
            assert isinstance(quote, str) or len(quote["problem"]) <= QUOTED + OWN, quote


# Who listens


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the address 127.0.0.2")
def test_run_ranks_listens_to_nobody_but_this_machine():
    """What listens to all addresses listens to 127.0.0.2 too; the store's is 127.0.0.1."""

    def ask(rank):
        port = int(os.environ["MASTER_PORT"])
        socket.create_connection(("127.0.0.1", port)).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port))
        return os.environ["GLOO_SOCKET_IFNAME"]

    assert run_ranks(ask, 2) == [socket.if_indextoname(1)] * 2
