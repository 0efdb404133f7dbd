"""tools/record.py, execute.py and scrub.py: what is executed, refused and saved."""

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from tests.book.tools.recorder import COMMIT, call, make_project

import book
import check
import execute
import record
import scrub

ROOT = Path(record.__file__).parent.parent

GOOD = """# %% [markdown]
# # A run

# %% name="values"
import os
import sys
import tempfile
import warnings
from pathlib import Path

from book import data_dir, figure, provenance, record, show_ranks, table
from miniddp import double

provenance(device="cpu", world_size=1, backend="gloo")
record(twice=double(4), backend="gloo")
print(len(list(data_dir().iterdir())), "data file at", data_dir())

# %% name="noise"
print(Path("src/miniddp/ring.py").resolve(), file=sys.stderr)
print("first", object())
print("home", Path.home() / "secret" / "x.txt", "/mnt/disk7/deep/file.bin")
print("\\x1b[31mred\\x1b[0m", tempfile.mkdtemp() + "/a", os.__file__)
os.system("echo child >&2")
warnings.warn("IProgress not found. Please update jupyter")
print("  0%|  | 0/9\\r100%|##| 9/9 [00:01<00:00, 9.51it/s]", file=sys.stderr)
show_ranks(["one", f"in {os.getcwd()}/src/x.py"])

# %% name="picture"
import matplotlib.pyplot as plt

_, axes = plt.subplots()
axes.plot([1, 2], [1, 2])
figure(axes.figure)
table([["a", 1.5]], ["x", "y"])
double(3)
"""
FAILING = """# %%
def claim(x):
    assert x == 2, "the claim"

# %% name="check"
from book import provenance

claim(2)
claim(
    3)
"""
SLOW = '# %% name="wait"\nimport time\ntime.sleep(60)\n'
DYING = '# %% name="die"\nimport os\nos._exit(7)\n'
SILENT = "# %%\n1\n"
REPEATED = (
    "# %%\nfrom book import provenance, record\nprovenance('cpu', 1, None)\nrecord(x=1)\n"
    "# %%\nrecord(x=2)\n"
)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A project with one recorded run."""
    folder = tmp_path_factory.mktemp("recorded")
    project = make_project(folder / "project", **{"01-good": GOOD})
    (folder / "mrpc").mkdir()
    (folder / "mrpc/train.txt").write_text("a\tb\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: "trainbox-07")
        patch.delenv("PYTEST_CURRENT_TEST")  # with it, ipykernel never forwards what children print
        code, out, err = call(project, "01-good", "--data-dir", str(folder / "mrpc"))
    path = project / "recordings/01-good.cpu.ipynb"
    assert code == 0, out + err
    return SimpleNamespace(
        project=project,
        data=folder / "mrpc",
        out=out,
        text=path.read_text(encoding="utf-8"),
        notebook=nbformat.read(path, as_version=4),
    )


def test_a_recording_is_a_valid_notebook_with_provenance(recorded):
    nbformat.validate(recorded.notebook)
    carried = dict(recorded.notebook.metadata.miniddp)
    assert carried.pop("seconds") > 0
    assert len(carried.pop("date")) == len("2026-01-01")
    assert carried.pop("device").endswith(" CPU")
    assert carried.pop("versions")["python"].startswith("3.")
    assert list(carried.pop("symbols")) == ["miniddp:double", "runs/01-good.py"]
    assert carried.pop("data") == {"source": "folder", "name": "MRPC, the original files"}
    assert carried == {
        "run": "01-good",
        "kind": "cpu",
        "device_count": 0,
        "world_size": [1],
        "backend": ["gloo"],
        "commit": COMMIT,
        "command": "make record RUN=01-good DATA_DIR=path/to/mrpc",
    }
    assert list(check.recording_problems(recorded.project)) == []
    status = json.loads((recorded.project / "recordings/status.json").read_text())
    cells = dict.fromkeys(("values", "noise", "picture"), "0")
    assert status == {"01-good": {"cpu": "fresh", "gpu": "missing", "cells": cells}}


def test_cells_keep_names_ids_and_outputs(recorded):
    cells = recorded.notebook.cells
    assert [cell.id for cell in cells] == ["cell-01", "values", "noise", "picture"]
    assert cells[1].metadata == {"name": "values"}
    assert cells[1].outputs[1].data[book.VALUES] == {"twice": 8, "backend": "gloo"}
    assert cells[2].outputs[1].data[book.RANKS] == {"ranks": ["one", "in src/x.py"]}
    picture, rows, value = cells[3].outputs
    assert picture.data["image/svg+xml"].startswith("<svg")
    assert rows.data["text/markdown"].splitlines()[-1] == "| a | 1.5 |"
    assert value.data["text/plain"] == "6"
    assert "execution" not in recorded.text.replace("execution_count", "")


def test_outputs_lose_what_belongs_to_the_machine(recorded):
    stdout, _, stderr = recorded.notebook.cells[2].outputs
    assert stdout.text.splitlines() == [
        "first <object object at 0x…>",
        "home ~/secret/x.txt …/file.bin",
        f"red tmp/a python3.{sys.version_info.minor}/os.py",
    ]
    assert stderr.text.splitlines() == ["src/miniddp/ring.py", "100%|##| 9/9"]
    assert "1 data file at data\n" in recorded.notebook.cells[1].outputs[-1].text
    outputs = json.dumps([cell.get("outputs") for cell in recorded.notebook.cells])
    for trace in (str(recorded.project), str(Path.home()), "/tmp", "trainbox", "/mnt"):
        assert trace not in outputs


def test_progress_names_each_cell(recorded):
    lines = [line.split() for line in recorded.out.splitlines()[:5]]
    assert [line[0] for line in lines] == ["01-good:", "values", "noise", "picture", "saved"]
    assert all(line[-1] == "s" for line in lines[1:4])


def test_a_second_recording_is_the_same(recorded):
    code, out, err = call(recorded.project, "01-good.py", "--data-dir", str(recorded.data))
    assert code == 0, out + err
    again = nbformat.read(recorded.project / "recordings/01-good.cpu.ipynb", as_version=4)
    for notebook in (again, recorded.notebook):
        notebook.metadata.miniddp.pop("seconds")
        for output in notebook.cells[2].outputs:
            output.pop("text", None)
    assert again == recorded.notebook


def test_nothing_is_recorded_when_all_is_fresh(recorded):
    assert call(recorded.project)[:2] == (0, "record.py: every recording is fresh\n")


def test_a_first_recording_has_its_page(recorded):
    assert "wrote runs/01-good.qmd: name it in _quarto.yml" in recorded.out
    assert (recorded.project / "runs/01-good.qmd").read_text() == (
        '---\ntitle: "Run 01-good: A run"\ndescription: "The executed notebook behind the outputs '
        'of this run, with its provenance."\n---\n\n::: {.notebook name="01-good"}\n:::\n'
    )


@pytest.mark.parametrize(
    ("description", "source"),
    [("train data from the hub", "hub"), ("train data from miniddp's sample", "sample")],
)
def test_data_of_the_hub_and_the_sample_are_told_apart(tmp_path, description, source):
    run = "# %%\nimport book\nbook.provenance('cpu', 1, None)\nassert book.data_dir() is None\n"
    project = make_project(tmp_path, **{"01-a": run})
    (project / "src/finetune").mkdir()
    (project / "src/finetune/__init__.py").touch()
    (project / "src/finetune/data.py").write_text(
        "from types import SimpleNamespace as N\n"
        f"def load_mrpc(): return N(info=N(description={description!r}))\n"
    )
    code, out, err = call(project, "01-a")
    assert code == 0, out + err
    carried = check.read_recording(project / "recordings/01-a.cpu.ipynb")["metadata"]["miniddp"]
    assert carried["data"] == {"source": source, "name": record.DATA[source]}
    assert carried["command"] == "make record RUN=01-a"


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    """What record.py says of runs that must not be saved, by run."""
    runs = {
        "01-failing": FAILING,
        "02-slow": SLOW,
        "03-dying": DYING,
        "04-silent": SILENT,
        "05-repeated": REPEATED,
        "06-unreadable": "# %%\nx = (\n",
    }
    project = make_project(tmp_path_factory.mktemp("refused") / "project", **runs)
    old = project / "recordings/01-failing.cpu.ipynb"
    old.parent.mkdir()
    old.write_text("{}")
    slow = call(project, "02-slow", "--timeout", "2")
    others = call(project, *(name for name in runs if name != "02-slow"))
    assert slow[0] == others[0] == 1
    err = slow[2] + others[2]
    assert old.read_text() == "{}"
    assert [path.name for path in (project / "recordings").glob("*.ipynb*")] == [old.name]
    parts = err.split("record.py: ")[1:]
    return {part.partition(":")[0]: part.partition(": ")[2] for part in parts}


def test_a_failing_assertion_is_shown_with_cell_and_source_line(refused):
    lines = refused["01-failing"].splitlines()
    assert lines[0] == 'cell "check" failed at line 3: assert x == 2, "the claim"'
    assert lines[-1].strip() == "AssertionError: the claim"
    assert len(lines) <= execute.TRACEBACK_LINES + 1


def test_other_refusals_are_named(refused):
    assert refused["02-slow"].splitlines() == [
        'cell "wait" failed at line 2: import time',
        "    ran longer than 2 s",
    ]
    assert refused["03-dying"].splitlines() == [
        'cell "die" failed at line 2: import os',
        "    the Python process died",
    ]
    assert refused["06-unreadable"].startswith("06-unreadable.py, line 2: not valid Python")
    assert refused["04-silent"].startswith("no cell calls provenance(")
    assert refused["05-repeated"].strip() == "record() was given 'x' twice, expected each key once"


def test_ranks_are_recorded_with_places_in_the_run(tmp_path):
    """With the real package: a rank's traceback names the run's file and line."""
    project = make_project(
        tmp_path / "project",
        **{
            "01-ranks": """# %%
from book import provenance, show_ranks
from miniddp import run_ranks

provenance("cpu", 2, "gloo")

# %% name="hello"
def hello(rank):
    print("rank", rank)
    if rank == 1:
        raise ValueError("boom")

try:
    run_ranks(hello, 2, timeout=120)
except RuntimeError as error:
    show_ranks(error.outputs)
    print(error)
"""
        },
    )
    shutil.rmtree(project / "src")
    shutil.copytree(ROOT / "src", project / "src")
    code, out, err = call(project, "01-ranks")
    assert code == 0, out + err
    notebook = nbformat.read(project / "recordings/01-ranks.cpu.ipynb", as_version=4)
    ranks, text = notebook.cells[1].outputs
    assert ranks.data[book.RANKS]["ranks"][0] == "rank 0"
    assert 'File "runs/01-ranks.py", line 11, in hello' in text.text
    assert "miniddp.launch.ranks:run_ranks" in notebook.metadata.miniddp.symbols
    assert "torch" in notebook.metadata.miniddp.versions


# Without a kernel


@pytest.mark.parametrize(
    ("device", "gpus", "used_cuda", "expected"),
    [
        ("cpu", [], False, "cpu"),
        ("cpu", ["A GPU"], False, "cpu"),
        ("cuda", ["A GPU"], True, "gpu"),
        ("cuda", [], False, "provenance says cuda, but torch sees no GPU"),
        ("cpu", ["A GPU"], True, "provenance says cpu, but the run used CUDA"),
    ],
)
def test_the_kind_must_be_true(device, gpus, used_cuda, expected):
    facts = {"provenance": {"device": device}, "gpus": gpus, "used_cuda": used_cuda}
    if expected in ("cpu", "gpu"):
        assert record.kind_of(facts) == expected
        return
    with pytest.raises(record.RecordError, match=expected):
        record.kind_of(facts)


def test_uncommitted_code_is_refused(tmp_path):
    project = make_project(tmp_path, **{"01-a": SILENT, "02-b": SILENT})

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", "-C", tmp_path, *identity, *arguments], check=True, timeout=60)

    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    used = [project / "runs/01-a.py", project / "src/miniddp/__init__.py"]
    commit = record.commit_of(project, used, None)
    assert len(commit) == 40
    (project / "runs/02-b.py").write_text("# %%\n2\n")
    assert record.commit_of(project, used, None) == commit
    used[1].write_text("x = 1\n")
    (project / "src/miniddp/sample.tsv").write_text("a\n")
    message = r"not committed: src/miniddp/__init__\.py, src/miniddp/sample\.tsv$"
    with pytest.raises(record.RecordError, match=message):
        record.commit_of(project, used, None)
    with pytest.raises(record.RecordError, match="but the repository is at"):
        record.commit_of(project, used, COMMIT)
    git("reset", "-q", "--hard")
    git("mv", "runs/02-b.py", "runs/01-c.py")
    with pytest.raises(record.RecordError, match=r"not committed: runs/01-c\.py, src"):
        record.commit_of(project, [project / "runs/01-c.py"], None)


def test_without_git_the_commit_must_be_given(tmp_path):
    with pytest.raises(record.RecordError, match="give --commit with 40 hex digits"):
        record.commit_of(tmp_path, [], None)
    assert record.commit_of(tmp_path, [], COMMIT) == COMMIT


def test_a_failed_write_leaves_the_old_recording(tmp_path, monkeypatch):
    path = tmp_path / "01-a.cpu.ipynb"
    path.write_text("old")

    def fail(_):
        raise OSError("disk full")

    monkeypatch.setattr(record.os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        record.save({"cells": []}, path)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert path.read_text() == "old"


def test_a_leak_that_scrubbing_missed_is_refused():
    output = nbformat.v4.new_output("stream", text="see /home/ada/x\n")
    cell = nbformat.v4.new_code_cell("1", id="a", outputs=[output])
    notebook = nbformat.v4.new_notebook(cells=[cell])
    with pytest.raises(record.RecordError, match="would still hold '/home/ada/x' in a"):
        record.refuse_bad_notebook(notebook)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["99-none"], "no run named '99-none'; the runs are "),
        (["--merge", "/no/such/folder"], "argument --merge: no folder /no/such/folder"),
        (["05-ring", "--accept"], '--accept needs a RUN and --reason "…"'),
        (["--accept", "--reason", "renamed"], '--accept needs a RUN and --reason "…"'),
        (
            ["05-ring", "--accept", "--prose"],
            "argument --prose: not allowed with argument --accept",
        ),
        (["x", "--kind", "tpu"], "argument --kind: invalid choice: 'tpu'"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["x", "--timeout", "soon"], "argument --timeout: invalid seconds value: 'soon'"),
        (["x", "--timeout", "0"], "argument --timeout: must be positive"),
        (["x", "--data-dir", "/no/such/folder"], "argument --data-dir: no folder /no/such/folder"),
    ],
)
def test_bad_input_is_one_line(arguments, message):
    command = [sys.executable, record.__file__, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith(f"record.py: {message}")


def test_a_missing_module_is_named(tmp_path, monkeypatch):
    project = make_project(tmp_path, **{"01-a": SILENT})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name != "nbclient")
    code, _, err = call(project, "01-a")
    assert (code, err) == (
        2,
        "record.py: nbclient is not installed: pip install --group record -e .\n",
    )


# Scrubbing


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/repo/src/miniddp/ring.py", "src/miniddp/ring.py"),
        (
            'File "/repo/.venv/lib/python3.12/site-packages/torch/a.py"',
            'File "site-packages/torch/a.py"',
        ),
        ('File "/usr/lib/python3.12/runpy.py", line 8', 'File "python3.12/runpy.py", line 8'),
        ('File "/tmp/ipykernel_12/34.py", line 2', 'File "runs/01-a.py", line 11'),
        ('File "/tmp/ipykernel_12/99.py", line 2', 'File "notebook-cell", line 2'),
        ("/home/grace/x.txt /Users/grace/y", "…/x.txt …/y"),
        ("at /repo", "at ."),
        ("/repository/a and /dev/shm/b", "…/a and /dev/shm/b"),
        ("3 GB/s, 1/2/3, https://example.org/a/b, src/a/b", None),
        ("[rank0]:[W1121 00:49:12.123456789 socket.cpp:7] x", "[rank0]:[W socket.cpp:7] x"),
        ("2026-01-02 03:04:05,678 INFO x", "INFO x"),
        ("<A at 0x7f12ab34cd56> 0xff", "<A at 0x…> 0xff"),
        ("50%|# | 1/2 [00:01<00:01, 1.0s/it]", "50%|# | 1/2"),
        (
            "on trainbox-07.example.org, trainbox-07 and trainbox-070",
            "on localhost, localhost and trainbox-070",
        ),
        ("hopper@trainbox-07 (hopper) hoppers", "user@localhost (user) hoppers"),
    ],
)
def test_scrubbing_a_text(monkeypatch, text, expected):
    monkeypatch.setattr(socket, "gethostname", lambda: "trainbox-07.example.org")
    monkeypatch.setattr("getpass.getuser", lambda: "hopper")
    cells = {"/tmp/ipykernel_12/34.py": ("runs/01-a.py", 10)}
    assert scrub.Scrubber(Path("/repo"), cells=cells).text(text) == (expected or text)


def test_a_name_that_is_an_ordinary_word_is_kept_in_prose(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "vm")
    monkeypatch.setattr("getpass.getuser", lambda: "bucket")
    scrubber = scrub.Scrubber(Path("/repo"), words=frozenset({"bucket"}))
    text = "the bucket of a vm; bucket@vm; [vm]:29500"
    assert scrubber.text(text) == "the bucket of a vm; user@localhost; [localhost]:29500"
    assert scrubber.bundle({"image/png": "/home/ada/"}) == {"image/png": "/home/ada/"}
