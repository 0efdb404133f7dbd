"""tools/check.py: what it reports about recordings and chapters."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import check
import digest
import quoted

RUN = '# %% [markdown]\n# # Ring\n\n# %% name="sum"\nfrom miniddp import ring\nring.add(1)\n'

QUOTE = '::: {.code symbol="miniddp.ring:add"}\n:::\n'


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A small book without a problem."""
    write(tmp_path, "src/miniddp/__init__.py", "")
    for name in quoted.PATH:
        write(tmp_path, f"src/miniddp/{name}.py", "")
    write(tmp_path, "src/miniddp/ring.py", "def add(x):\n    return x\n")
    write(tmp_path, "runs/05-ring.py", RUN)
    write(tmp_path, "runs/05-ring.qmd", check.page_text(tmp_path, "05-ring"))
    write(tmp_path, "index.qmd", "# Start\n")
    write(tmp_path, "chapters/05-ring.qmd", f"# The ring\n\n{QUOTE}")
    chapters = "- index.qmd\n    - part: One\n      chapters: [chapters/05-ring.qmd]\n"
    write(tmp_path, "_quarto.yml", f"book:\n  chapters:\n    {chapters}    - runs/05-ring.qmd\n")
    write_recording(tmp_path, "cpu")
    check.write_status(tmp_path)
    return tmp_path


def write(project: Path, path: str, text: str) -> None:
    (project / path).parent.mkdir(parents=True, exist_ok=True)
    (project / path).write_text(text, encoding="utf-8")


def write_recording(project: Path, kind: str, text: str = "3\n", **changes: object) -> None:
    carried = {
        "run": "05-ring",
        "kind": kind,
        "device": "a device",
        "device_count": 0,
        "world_size": [1],
        "backend": ["gloo"],
        "versions": {"torch": "2.13.0"},
        "data": None,
        "commit": "0" * 40,
        "date": "2026-01-01",
        "command": "make record RUN=05-ring",
        "seconds": 1.5,
        "symbols": digest.symbols(project, "05-ring"),
        **changes,
    }
    output = {"output_type": "stream", "name": "stdout", "text": [text]}
    heading = {"cell_type": "markdown", "id": "a", "metadata": {}, "source": ["# Ring"]}
    cell = {
        "cell_type": "code",
        "id": "sum",
        "metadata": {"name": "sum"},
        "execution_count": 1,
        "source": ["from miniddp import ring\n", "ring.add(1)"],
        "outputs": [output],
    }
    notebook = {
        "nbformat": 4,
        "nbformat_minor": 5,
        "metadata": {"miniddp": {key: value for key, value in carried.items() if value != "drop"}},
        "cells": [heading, cell],
    }
    write(project, f"recordings/05-ring.{kind}.ipynb", json.dumps(notebook))


def run(project: Path, capsys, *arguments: str) -> tuple[int, list[str]]:
    """The exit status, and the lines printed."""
    code = check.main(list(arguments), project)
    lines = capsys.readouterr().out.splitlines()
    note = "note: no git history here, so the commits of the recordings are not checked"
    return code, [line for line in lines if line != note]


def test_a_book_without_a_problem_passes(project, capsys):
    assert run(project, capsys) == (
        0,
        ["05-ring  CPU fresh    GPU missing", "0 errors, 0 warnings"],
    )


def test_a_stale_cpu_recording_fails_and_names_the_symbol(project, capsys):
    write(project, "src/miniddp/ring.py", "def add(x):\n    return x + 1\n")
    code, lines = run(project, capsys, "--write-status")
    assert code == 1
    assert lines == [
        "05-ring  CPU stale    GPU missing",
        "error: recordings/05-ring.cpu.ipynb is stale: miniddp.ring:add changed"
        " (make record RUN=05-ring)",
        "1 errors, 0 warnings",
    ]
    status = json.loads((project / "recordings/status.json").read_text())
    cells = {"sum": "0"}
    assert status == {"05-ring": {"cpu": "stale", "gpu": "missing", "cells": cells}}


def test_a_stale_gpu_recording_is_reported_and_passes(project, capsys):
    symbols = {**digest.symbols(project, "05-ring"), "miniddp.ring:old": "0" * 16}
    write_recording(project, "gpu", symbols=symbols)
    code, lines = run(project, capsys, "--write-status")
    assert code == 0
    assert lines[0] == "05-ring  CPU fresh    GPU stale    GPU: miniddp.ring:old is no longer used"
    status = json.loads((project / "recordings/status.json").read_text())
    assert status["05-ring"]["gpu"] == "stale"


def test_a_missing_cpu_recording_fails(project, capsys):
    (project / "recordings/05-ring.cpu.ipynb").unlink()
    code, lines = run(project, capsys, "--write-status")
    assert code == 1
    assert "error: recordings/05-ring.cpu.ipynb is missing (make record RUN=05-ring)" in lines


def test_a_status_file_is_not_blamed_for_what_recording_mends(project, capsys):
    write(project, "src/miniddp/ring.py", "def add(x):\n    return x + 1\n")
    code, lines = run(project, capsys)
    assert code == 1
    assert [line for line in lines if "status.json" in line] == []


def test_a_status_file_that_lags_fails(project, capsys):
    write_recording(project, "gpu")
    code, lines = run(project, capsys)
    assert code == 1
    assert lines[1].startswith("error: recordings/status.json is out of date")
    assert run(project, capsys, "--write-status")[0] == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a notebook: not JSON"),
        ("[]", "not a notebook"),
        (
            '{"nbformat": 4, "cells": [], "metadata": {}}',
            "no metadata 'miniddp': not made by make record",
        ),
    ],
)
def test_a_file_that_is_no_recording_is_named(project, capsys, text, message):
    write(project, "recordings/05-ring.cpu.ipynb", text)
    code, lines = run(project, capsys, "--write-status")
    assert code == 1
    assert f"error: recordings/05-ring.cpu.ipynb: {message}" in lines


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text": "/home/ada/x\n"}, "recordings/05-ring.cpu.ipynb: it holds '/home/ada/x' in sum"),
        ({"text": "\x1b[31mred"}, "recordings/05-ring.cpu.ipynb: it holds '\\x1b[31m' in sum"),
        ({"text": "<A at 0x7f00aa11bb22>"}, "holds '0x7f00aa11bb22' in sum"),
        ({"device": "/home/ada/gpu"}, "holds '/home/ada/gpu' in its metadata"),
        ({"commit": "abc"}, "commit is 'abc', expected 40 hex digits"),
        ({"seconds": "drop"}, "it lacks the metadata 'seconds'"),
        ({"world_size": 2}, "metadata 'world_size' is 2"),
        ({"accepted": [{"reason": "x"}]}, "metadata 'accepted' needs reason, date and commit"),
        ({"run": "06-other"}, "has no run: runs/06-other.py does not exist"),
    ],
)
def test_bad_recordings_are_named(project, changes, message):
    write_recording(project, "cpu", **changes)
    assert any(message in problem for problem in check.recording_problems(project))


def test_a_cell_that_failed_or_did_not_run_is_named(project):
    path = project / "recordings/05-ring.cpu.ipynb"
    notebook = json.loads(path.read_text())
    notebook["cells"][1]["execution_count"] = None
    notebook["cells"][1]["outputs"] = [{"output_type": "error", "traceback": []}]
    path.write_text(json.dumps(notebook))
    assert list(check.recording_problems(project)) == [
        "recordings/05-ring.cpu.ipynb: sum was not executed",
        "recordings/05-ring.cpu.ipynb: sum ended in an error",
    ]


def test_pages_and_the_table_of_contents_agree(project):
    write(project, "chapters/06-draft.qmd", "# Draft\n")
    write(project, "runs/06-new.py", "# %%\n1\n")
    (project / "index.qmd").unlink()
    assert list(check.page_problems(project)) == [
        "_quarto.yml names index.qmd, which does not exist",
        "chapters/06-draft.qmd is not listed in _quarto.yml",
        "runs/06-new.py has no page runs/06-new.qmd (make record RUN=06-new writes it)",
    ]


def test_a_page_of_a_run_that_says_something_else_is_named(project):
    write(project, "runs/05-ring.py", RUN.replace("# # Ring", "# # The ring"))
    assert list(check.page_problems(project)) == [
        "runs/05-ring.qmd is not the page of its run (make prose RUN=05-ring writes it)"
    ]


def test_executable_cells_are_named(project):
    text = "# Ring\n\n```{python}\n1\n```\n\n```python\n2\n```\n"
    write(project, "chapters/05-ring.qmd", text)
    assert list(check.chapter_problems(project)) == [
        "chapters/05-ring.qmd, line 3: executable cell {python}; quote a run instead"
    ]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It moves 3.2 GB/s.", ["3.2 GB/s"]),
        ("It takes\n12 ms or 4\u00a0seconds.", ["12 ms", "4 seconds"]),
        ("It is 1.8× faster and saves 38 %.", ["1.8×", "38 %"]),
        ("A 2 × 3 matrix, 4 ranks, 64 MB, step 5, version 2.13.", []),
        ("[]{.val run='a' key='b' unit='GB/s'} and [3 ms]{.val}", []),
        ("The factor is $1.5 ms$ and `sleep 3 s`.", []),
        ("Published: 38 % [@li2020].", []),
        ("See [the guide](https://example.org): 90 %.", []),
        ("| a | b |\n|---|---|\n| x | 3 ms |\n", ["3 ms"]),
        ("| a | b |\n|---|---|\n| x | 3 ms |\n\n: Times [@li2020, table 1].\n", []),
        ("| rank 0, second | step 1, seconds |\n|---|---|\n", []),
        ("| a | b |\n|---|---|\n| x | 3 ms [@li2020] |\n", []),
        ("As @li2020 report, it is 38 %.", []),
        ("The curve of @fig-time falls by 38 %.", ["38 %"]),
        ("```\n3 ms\n```\n", []),
        ("$$\n3 ms\n$$ {#eq-a}\n", []),
        ("::: {.exercise}\nA link has 3 GB/s.\n\n::: {.answer}\n2 ms\n:::\n:::\n4 ms\n", ["4 ms"]),
        ("---\ntitle: 3 ms\n---\n\n<!-- 5 ms -->\n", []),
    ],
)
def test_numbers_typed_by_hand(project, text, found):
    write(project, "chapters/05-ring.qmd", text)
    warnings = list(check.typed_numbers(project))
    assert [warning.split("'")[1] for warning in warnings] == found


def test_a_typed_number_is_found_at_its_line(project):
    write(project, "chapters/05-ring.qmd", "# A\n\n```\ncode\n```\n\nFirst\nsecond 3 ms.\n")
    (warning,) = check.typed_numbers(project)
    assert warning == ("chapters/05-ring.qmd, line 8: '3 ms' is typed by hand; quote a run or cite")


@pytest.fixture
def cited(project: Path) -> Path:
    """The small book with a bibliography of two entries, of which one is cited."""
    config = (project / "_quarto.yml").read_text(encoding="utf-8")
    write(project, "_quarto.yml", f"{config}\nbibliography: refs.bib\n")
    write(project, "refs.bib", "@article{li2020,\n  title={A}\n}\n@online{nccl-env, title={B}}\n")
    write(project, "index.qmd", "# Start\n\nSee [@li2020, section 5].\n")
    return project


def test_what_nobody_cites_is_a_warning(cited, capsys):
    code, lines = run(cited, capsys)
    assert code == 0
    assert "warning: @nccl-env stands in the bibliography, and no page cites it" in lines
    assert lines[-1] == "0 errors, 1 warnings"
    write(cited, "chapters/05-ring.qmd", f"See @nccl-env.\n\n{QUOTE}")
    assert run(cited, capsys) == (
        0,
        ["05-ring  CPU fresh    GPU missing", "0 errors, 0 warnings"],
    )


def test_code_of_the_path_that_no_chapter_quotes_is_an_error(project, capsys):
    write(project, "chapters/05-ring.qmd", "# The ring\n")
    code, lines = run(project, capsys)
    assert code == 1
    assert "error: src/miniddp/ring.py, lines 1 to 2: no chapter quotes `def add(x):`" in lines


def test_a_run_that_cannot_be_read_is_one_line(project, capsys):
    write(project, "runs/05-ring.py", "# %%\nx = (\n")
    assert check.main([], project) == 1
    assert capsys.readouterr().err == (
        "check.py: 05-ring.py, line 2: not valid Python: '(' was never closed\n"
    )


def test_an_unknown_option_is_one_line_and_only_the_standard_library_is_needed():
    command = [sys.executable, "-E", "-S", Path(check.__file__), "--nonsense"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr == "check.py: unrecognized arguments: --nonsense (see --help)\n"


def test_a_fresh_recording_whose_run_starts_no_ranks_claims_none(project, capsys):
    write_recording(project, "cpu", world_size=[2])
    code, lines = run(project, capsys)
    assert code == 1
    assert "error: runs/05-ring.py: provenance() says 2 ranks, and no cell has run them" in lines
