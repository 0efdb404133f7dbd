"""The notebooks, as somebody runs them who has nothing but a link to them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

import anywhere
import digest
import execute
from address import current

ROOT = Path(__file__).resolve().parents[2]
RANKS = ROOT / "runs" / "ranks.ipynb"
RUN = "17-runbook"  # a quick one
PIP = "import os, sys; open(os.environ['PIP_CALLS'], 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"

Execute = Callable[[Any], str]


def client(notebook: Any, folder: Path) -> NotebookClient:
    """Its kernel is this Python's; the end of the kernel is that of all it has started."""
    (folder / "kernels").mkdir(exist_ok=True)
    execute.write_kernelspec(folder / "kernels" / "python3")
    return NotebookClient(notebook, timeout=120, kernel_name="python3", shutdown_kernel="immediate")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine of its own kernel, where pip does nothing and nobody ends processes by name."""
    with tempfile.TemporaryDirectory() as name:  # short: it holds sockets
        folder = Path(name)
        (folder / "pip").mkdir()
        (folder / "pip" / "__init__.py").touch()  # else the real one is found
        (folder / "pip" / "__main__.py").write_text(PIP, encoding="utf-8")
        (folder / "bin").mkdir()
        (folder / "bin" / "pkill").symlink_to("/bin/false")
        path = [str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
        monkeypatch.setenv("PATH", os.pathsep.join(path))
        search = [str(folder), os.environ.get("PYTHONPATH", "")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, search)))
        monkeypatch.setenv("PIP_CALLS", str(folder / "calls"))
        monkeypatch.setenv("PIP_DRY_RUN", "1")  # and if it were, it would do nothing
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setenv("JUPYTER_PATH", name)
        yield folder


def run(cells: list[Any], folder: Path, working: Path) -> dict[str, str]:
    """Execute cells in a new kernel; what each put out, by its id."""
    notebook = nbformat.v4.new_notebook(cells=cells)
    jupyter = client(notebook, folder)
    said = {}
    with jupyter.setup_kernel(cwd=str(working)):
        for number, cell in enumerate(notebook.cells):
            for _ in range(4):
                jupyter.execute_cell(cell, number)
                said[cell.id] = "".join(
                    output.get("text", "") for output in cell.get("outputs", [])
                )
                if "Timeout waiting" not in said[cell.id]:
                    break
    return said


def test_every_notebook_begins_with_the_cell_that_sets_it_up() -> None:
    first = {cell["id"]: "".join(cell["source"]) for cell in json.loads(RANKS.read_text())["cells"]}
    expected = anywhere.source(ROOT, "Run the cells from the top.")
    assert first[anywhere.NAME] == expected
    assert digest.notebook(ROOT, RUN)[0].source == anywhere.of_run(ROOT, RUN)
    assert anywhere.of_run(ROOT, RUN).splitlines()[3:] == expected.splitlines()[3:]


@pytest.mark.skipif(not find_spec("nbdistributed"), reason="nbdistributed is not installed")
@pytest.mark.skipif(not Path("/bin/false").exists(), reason="there is no /bin/false")
def test_two_ranks_answer_in_a_notebook(environment: Path) -> None:
    cells = [cell for cell in nbformat.read(RANKS, as_version=4).cells if cell.cell_type == "code"]
    said = run([cell for cell in cells if cell.id != "install"], environment, ROOT / "runs")
    for rank in range(2):
        assert f"rank {rank} of 2 over gloo" in said["who"]
    assert said["sum"].count("11.0") == 2
    assert said["average"] != said["gradients"]
    ours = [line.strip() for line in said["average"].splitlines() if line.strip().startswith("[")]
    assert len(ours) == 2
    assert ours[0] == ours[1]
    assert said["one-rank"].count("only rank 0 says this") == 1
    assert "Successfully shut down 2/2 workers" in said["end"]


def git(*command: str, folder: Path) -> None:
    subprocess.run(["git", *command], cwd=folder, check=True, capture_output=True)


def test_a_notebook_runs_in_an_empty_folder_and_leaves_a_recording(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = current(ROOT)
    git("clone", "--quiet", str(ROOT), str(tmp_path / "published"), folder=tmp_path)
    git("checkout", "-q", "-B", named["repo-branch"], folder=tmp_path / "published")
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", f"url.{(tmp_path / 'published').as_uri()}.insteadOf")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", named["repo-url"])
    empty = tmp_path / "empty"
    empty.mkdir()

    cells = execute.notebook_cells(digest.notebook(ROOT, RUN))
    said = run([nbformat.from_dict(cell) for cell in cells], environment, empty)
    assert "report_loss" in said["last-calls"]
    here = empty / "ddp-from-scratch"
    assert (environment / "calls").read_text().startswith("install --quiet --editable ./ddp-from")

    command = f"{sys.executable} tools/record.py {RUN} --output brought"
    assert command.split(" ", 1)[1] in cells[0]["source"]
    subprocess.run(command.split(), cwd=here, check=True, timeout=200)
    brought = here / "brought" / f"{RUN}.cpu.ipynb"
    merge = [sys.executable, "tools/record.py", "--merge", str(brought.parent)]
    done = subprocess.run(merge, cwd=tmp_path / "published", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("fresh")

    altered = json.loads(brought.read_text())
    own_code = [cell for cell in altered["cells"][1:] if cell["cell_type"] == "code"]
    own_code[0]["source"] = ["print('another experiment')"]
    brought.write_text(json.dumps(altered))
    done = subprocess.run(merge, cwd=tmp_path / "published", capture_output=True, text=True)
    assert done.returncode == 1
    assert (
        done.stderr == f"record.py: {RUN}.cpu.ipynb: its code was altered after it was recorded\n"
    )
