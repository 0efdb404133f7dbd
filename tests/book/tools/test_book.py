"""runs/book.py: what it displays in a notebook and prints in a script."""

import json
import os
import re
import subprocess
import sys
import types
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import IPython.display
import matplotlib as mpl
import numpy as np
import pytest

import book

mpl.use("agg")


@pytest.fixture
def shown(monkeypatch):
    """The bundles displayed, as in a notebook."""
    bundles = []
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    monkeypatch.setattr(IPython.display, "display", lambda bundle, raw: bundles.append(bundle))
    return bundles


@pytest.fixture(autouse=True)
def as_script(monkeypatch):
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    monkeypatch.setitem(book.facts, "provenance", None)
    monkeypatch.setitem(book.facts, "data", None)


@pytest.fixture
def axes():
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots()
    yield axes
    plt.close(figure)


def test_record_displays_plain_values(shown):
    book.record(ratio=np.float32(1.5), bytes=np.int64(40), device="cpu", rounds=3)
    values = {"ratio": 1.5, "bytes": 40, "device": "cpu", "rounds": 3}
    assert shown[0][book.VALUES] == values
    assert [type(value) for value in shown[0][book.VALUES].values()] == [float, int, str, int]
    assert shown[0]["text/plain"].splitlines()[0] == "ratio = 1.5"


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"x": float("nan")}, ValueError, "x is nan, expected a finite number"),
        ({"x": [1]}, TypeError, "x must be a number or a string, not list"),
        ({"x": True}, TypeError, "not bool"),
        ({}, ValueError, "at least one value"),
    ],
)
def test_record_refuses_what_cannot_be_quoted(values, error, message):
    with pytest.raises(error, match=message):
        book.record(**values)


def test_show_ranks_takes_texts_or_the_results_of_run_ranks(shown):
    results = types.SimpleNamespace(outputs=["a\nb\n", ""])
    book.show_ranks(results)
    book.show_ranks(["x"], title="One")
    assert shown[0][book.RANKS] == {"ranks": ["a\nb", ""]}
    assert shown[0]["text/plain"].splitlines() == ["rank 0 | a", "rank 0 | b", "rank 1 | "]
    assert shown[1][book.RANKS] == {"ranks": ["x"], "title": "One"}


def test_table_aligns_numbers_and_escapes_pipes(shown):
    book.table([["a|b", 1.23456, "12 MB"], ["c", 12345.6, "3 MB"]], ["what", "x", "size"])
    assert shown[0]["text/markdown"].splitlines() == [
        "| what | x | size |",
        "| ---- | -----: | ----: |",
        r"| a\|b | 1.235 | 12 MB |",
        "| c | 12,346 | 3 MB |",
    ]
    assert shown[0]["text/plain"].splitlines() == [
        "what       x   size",
        "a|b    1.235  12 MB",
        "c     12,346   3 MB",
    ]


def test_table_refuses_a_row_of_another_length():
    with pytest.raises(ValueError, match="row 1 has 1 cells, expected 2"):
        book.table([[1, 2], [3]], ["a", "b"])
    with pytest.raises(ValueError, match="align must have"):
        book.table([[1, 2]], ["a", "b"], align="lx")


def test_figure_is_text_in_palette_colours_with_ids_of_its_own(shown, axes):
    axes.plot([1, 2], [1, 4], marker="o", label="ring")
    axes.set(xlabel="size", ylabel="time", title="A < B")
    axes.legend()
    book.figure(axes.figure)
    svg = shown[0]["image/svg+xml"]
    tree = ElementTree.fromstring(svg)
    texts = [
        "".join(element.itertext()) for element in tree.iter("{http://www.w3.org/2000/svg}text")
    ]
    assert {"size", "time", "A < B", "ring"} <= set(texts)
    identities = [element.get("id") for element in tree.iter() if element.get("id")]
    assert identities
    assert len({identity.split("-")[0] for identity in identities}) == 1
    used = set(re.findall(r"(?:url\(|href=\")#([\w-]+)", svg))
    assert used == set(identities)
    assert "<style" not in svg
    assert "DejaVu" not in svg
    assert "var(--rank-0, #2563eb)" in svg
    assert not re.search(r"[^,] #[0-9a-f]{6}", svg)
    assert shown[0]["text/plain"] == "figure: time against size (ring)"


def test_the_same_figure_gives_the_same_svg(axes):
    axes.plot([1, 2], [1, 4], marker="o")
    assert book._svg(axes.figure) == book._svg(axes.figure)


def test_figure_refuses_other_colours(axes):
    axes.plot([1, 2], color="#123456")
    with pytest.raises(ValueError, match="uses #123456"):
        book.figure(axes.figure)


def test_provenance_is_kept_and_said_once(capsys):
    book.provenance("cuda:0", [2, 4], ["gloo", "nccl"])
    expected = {"device": "cuda", "world_size": [2, 4], "backend": ["gloo", "nccl"]}
    assert book.facts["provenance"] == expected
    assert capsys.readouterr().out == "cuda: 2 and 4 ranks over gloo and nccl\n"
    with pytest.raises(RuntimeError, match="called twice"):
        book.provenance("cpu", 1, None)


def test_provenance_refuses_an_unknown_device():
    with pytest.raises(ValueError, match="must be cpu or cuda, not 'tpu'"):
        book.provenance("tpu", 1, None)


def test_data_dir(monkeypatch, tmp_path):
    monkeypatch.delenv("MINIDDP_DATA_DIR", raising=False)
    monkeypatch.setattr(sys, "argv", ["run.py"])
    assert book.data_dir() is None
    assert book.facts["data"] == "hub or sample"
    monkeypatch.setattr(sys, "argv", ["run.py", "--data-dir", str(tmp_path)])
    assert book.data_dir() == tmp_path
    monkeypatch.setattr(sys, "argv", ["run.py", f"--data-dir={tmp_path}"])
    assert book.data_dir() == tmp_path
    monkeypatch.setenv("MINIDDP_DATA_DIR", str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError, match="--data-dir: no folder"):
        book.data_dir()


def test_a_run_is_also_a_plain_script(tmp_path):
    run = tmp_path / "01-run.py"
    run.write_text(
        "from book import provenance, record, show_ranks\n"
        "provenance('cpu', 1, None)\nrecord(x=2)\nshow_ranks(['hello'])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(book.__file__).parent)}
    result = subprocess.run(
        [sys.executable, run], env=environment, capture_output=True, text=True, timeout=60
    )
    assert result.stdout == "cpu: 1 rank\nx = 2\nrank 0 | hello\n"
    assert result.returncode == 0


def recorded(start=0.0, steps=2):
    """What one rank's `Timeline` holds of some backward passes with two buckets."""
    events, marks = [], []
    for step in range(1, steps + 1):
        begin = start + step
        marks.append({"name": "backward", "time": begin})
        events += [
            {"step": step, "bucket": 1, "bytes": 30, "ready": begin + 0.3, "launched": begin + 0.3,
             "done": begin + 0.5},
            {"step": step, "bucket": 0, "bytes": 10, "ready": begin + 0.1, "launched": begin + 0.2,
             "done": begin + 0.25},
        ]  # fmt: skip
        marks.append({"name": "end", "time": begin + 0.6})
    return {"events": events, "marks": marks}


NAMES = [["2.weight"], ["1.weight", "0.weight"]]


def test_timeline_shows_one_pass_from_the_begin_of_backward(shown):
    book.timeline([recorded(), json.dumps(recorded(start=7.0))], NAMES)
    assert shown[0][book.TIMELINE] == {
        "step": 2,
        "buckets": [
            {"bytes": 10, "parameters": ["2.weight"]},
            {"bytes": 30, "parameters": ["1.weight", "0.weight"]},
        ],
        "ranks": [
            {"end": 0.6, "ready": [0.1, 0.3], "launched": [0.2, 0.3], "done": [0.25, 0.5]},
            {"end": 0.6, "ready": [0.1, 0.3], "launched": [0.2, 0.3], "done": [0.25, 0.5]},
        ],
    }
    first = "rank 0 | bucket 0: 10 bytes, ready 100.00 ms, launched 200.00 ms, done 250.00 ms"
    assert shown[0]["text/plain"].splitlines()[0] == first
    drawn = ElementTree.fromstring(shown[0]["image/svg+xml"])
    texts = {"".join(each.itertext()) for each in drawn.iter("{http://www.w3.org/2000/svg}text")}
    assert {"backward", "bucket 0", "bucket 1", "ms", "backward computes", "waits"} <= texts


def test_timeline_of_a_chosen_step(shown):
    book.timeline([recorded()], NAMES, step=1)
    assert shown[0][book.TIMELINE]["step"] == 1


def test_timeline_takes_what_a_timeline_gives(shown):
    class Timeline:
        def to_json(self):
            return json.dumps(recorded())

    book.timeline([Timeline()], NAMES)
    assert shown[0][book.TIMELINE]["ranks"][0]["end"] == 0.6


def without(name, where="events"):
    data = recorded()
    if where == "marks":
        data["marks"] = [mark for mark in data["marks"] if mark["name"] != name]
    else:
        del data["events"][-1][name]
    return data


@pytest.mark.parametrize(
    ("recordings", "names", "step", "message"),
    [
        ([], NAMES, None, "every rank must have the same buckets"),
        ([recorded()], NAMES[:1], None, "names for 1 buckets, expected 2"),
        ([recorded()], NAMES, 5, r"the timeline of rank 0 has no step 5 \(it has: \[1, 2\]\)"),
        ([recorded(), without("done")], NAMES, None, "bucket 0 of rank 1 was never done"),
        ([without("end", "marks")], NAMES, None, "does not say when step 2 began and ended"),
        ([without("backward", "marks")], NAMES, None, 'call note\\("backward"\\) before'),
        ([{"events": [], "marks": []}], NAMES, None, "has no step None"),
    ],
)
def test_bad_timelines_are_refused(recordings, names, step, message):
    with pytest.raises(ValueError, match=message):
        book.timeline(recordings, names, step)
