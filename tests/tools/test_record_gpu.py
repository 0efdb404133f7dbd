"""tools/record_gpu.py and tools/merge_recordings.py, rehearsed on a CPU with small runs."""

import contextlib
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import check
import merge_recordings
import record_gpu

ROOT = Path(record_gpu.__file__).parent.parent
COMMIT = "0123456789abcdef0123456789abcdef01234567"
QUICK = """# %%
from book import provenance
provenance(device=str("cpu"), world_size=1, backend=None)
"""
FIXED = '# %%\nfrom book import provenance\nprovenance(device="cpu", world_size=1, backend=None)\n'
FAILING = QUICK + "assert 1 == 2\n"
LONG = f"""{QUICK}
import os, time
from pathlib import Path
Path("kernel").write_text(str(os.getpid()))
time.sleep(600)
"""


def make_project(folder: Path, **runs: str) -> Path:
    (folder / "src/miniddp").mkdir(parents=True)
    (folder / "src/miniddp/__init__.py").write_text("")
    (folder / "runs").mkdir()
    shutil.copy(ROOT / "runs/book.py", folder / "runs/book.py")
    shutil.copytree(ROOT / "tools", folder / "tools", ignore=shutil.ignore_patterns("plain"))
    for name, text in runs.items():
        (folder / "runs" / f"{name}.py").write_text(text)
    return folder


def rehearse(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/record_gpu.py", "home", "--rehearse", "--commit", COMMIT]
    return subprocess.run(
        [*command, *arguments],
        cwd=project,
        capture_output=True,
        text=True,
        timeout=170,
    )


def merge(project: Path, folder: Path) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = merge_recordings.main([str(folder)], project)
    return code, out.getvalue(), err.getvalue()


def test_the_runs_of_the_book_in_the_order_of_their_worth():
    runs = record_gpu.wanted(ROOT, "gpu")
    first = [run for run in runs if run in record_gpu.WORTH]
    assert runs[: len(first)] == first == [run for run in record_gpu.WORTH if run in runs]
    assert runs[len(first) :] == sorted(runs[len(first) :])
    assert "06-sync" in runs or check.freshness(ROOT, "06-sync", "gpu")[0] == "fresh"


def test_a_run_that_says_cpu_is_not_recorded_on_a_gpu(tmp_path):
    project = make_project(tmp_path, **{"01-fixed": FIXED, "02-any": QUICK})
    assert record_gpu.wanted(project, "gpu") == ["02-any"]


def test_each_recording_is_saved_and_a_failure_does_not_stop_the_others(tmp_path):
    runs = {"01-quick": QUICK, "02-failing": FAILING, "03-quick": QUICK, "06-sync": QUICK}
    project = make_project(tmp_path, **runs)
    done = rehearse(project)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()[-5:]]
    assert lines[:4] == [
        ["06-sync", "recorded"],
        ["01-quick", "recorded"],
        ["02-failing", "failed"],
        ["03-quick", "recorded"],
    ]
    assert "3 of 4 runs recorded" in done.stdout
    saved = sorted(path.name for path in (project / "home").iterdir())
    assert saved == ["01-quick.cpu.ipynb", "03-quick.cpu.ipynb", "06-sync.cpu.ipynb"]
    carried = check.read_recording(project / "home/06-sync.cpu.ipynb")["metadata"]["miniddp"]
    assert (carried["commit"], carried["kind"], carried["dirty"]) == (COMMIT, "cpu", False)
    assert not list((project / "recordings").glob("*.ipynb")), "the book's own recordings stay"
    code, _, err = merge(project, project / "home")
    assert code == 1
    assert "06-sync.cpu.ipynb: refused: it is a CPU recording, expected a GPU recording" in err


def test_what_is_fresh_is_skipped(tmp_path):
    project = make_project(tmp_path, **{"01-quick": QUICK, "02-quick": QUICK})
    assert rehearse(project, "01-quick").returncode == 0
    shutil.copy(project / "home/01-quick.cpu.ipynb", project / "runs")
    assert record_gpu.wanted(project, "cpu") == ["02-quick"]
    (project / "runs/01-quick.py").write_text(QUICK + "1 + 1\n")
    assert record_gpu.wanted(project, "cpu") == ["01-quick", "02-quick"]


def test_a_spent_budget_ends_the_run_and_starts_no_other(tmp_path):
    project = make_project(tmp_path, **{"01-quick": QUICK, "02-long": LONG, "03-quick": QUICK})
    done = rehearse(project, "--budget", "24")
    assert done.returncode == 1, done.stdout + done.stderr
    ends = dict(line.split(maxsplit=1) for line in done.stdout.splitlines()[-4:-1])
    assert ends == {
        "01-quick": "recorded",
        "02-long": "stopped: the budget was spent",
        "03-quick": "not started: no time",
    }
    assert [path.name for path in (project / "home").iterdir()] == ["01-quick.cpu.ipynb"]
    kernel = int((project / "kernel").read_text())
    assert not Path(f"/proc/{kernel}").exists() or sys.platform != "linux"


def test_without_a_gpu_nothing_is_recorded_as_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(record_gpu, "has_gpu", lambda: False)
    assert record_gpu.main([str(tmp_path / "home")], make_project(tmp_path / "project")) == 2
    assert "torch sees no GPU here" in capsys.readouterr().err


@pytest.fixture
def brought(tmp_path):
    """A project, and a folder with a recording that was made for it on an imagined GPU."""
    project = make_project(tmp_path / "project", **{"01-quick": QUICK})
    done = rehearse(project, "01-quick")
    assert done.returncode == 0, done.stdout + done.stderr
    notebook = json.loads((project / "home/01-quick.cpu.ipynb").read_text())
    notebook["metadata"]["miniddp"].update(kind="gpu", device="Test GPU", device_count=1)
    folder = tmp_path / "brought"
    folder.mkdir()
    (folder / "01-quick.gpu.ipynb").write_text(json.dumps(notebook))
    return project, folder, notebook


def test_merge_takes_a_recording_and_updates_the_status(brought):
    project, folder, _ = brought
    code, out, err = merge(project, folder)
    assert code == 0, err
    assert "01-quick.gpu.ipynb: Test GPU, torch" in out
    assert "commit 0123456, fresh" in out
    status = json.loads((project / "recordings/status.json").read_text())
    assert status == {"01-quick": {"cpu": "missing", "gpu": "fresh"}}


def test_merge_does_not_replace_a_fresh_recording_by_a_stale_one(brought):
    project, folder, notebook = brought
    assert merge(project, folder)[0] == 0
    before = (project / "recordings/01-quick.gpu.ipynb").read_bytes()
    notebook["metadata"]["miniddp"]["symbols"]["runs/01-quick.py"] = "0" * 16
    (folder / "01-quick.gpu.ipynb").write_text(json.dumps(notebook))
    code, _, err = merge(project, folder)
    assert code == 1
    assert "refused: it is stale, and the recording that is there is fresh" in err
    assert (project / "recordings/01-quick.gpu.ipynb").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"run": "02-other"}, "it says that it is 02-other"),
        ({"dirty": True}, "it was recorded from uncommitted code"),
        ({"device": "/home/somebody/gpu"}, "in its metadata"),
    ],
)
def test_merge_refuses(brought, change, why):
    project, folder, notebook = brought
    notebook["metadata"]["miniddp"].update(change)
    (folder / "01-quick.gpu.ipynb").write_text(json.dumps(notebook))
    code, _, err = merge(project, folder)
    assert code == 1
    assert why in err
    assert not (project / "recordings/01-quick.gpu.ipynb").exists()


def test_merge_refuses_a_file_that_is_cut_short(brought):
    project, folder, _ = brought
    path = folder / "01-quick.gpu.ipynb"
    path.write_text(path.read_text()[:200])
    code, _, err = merge(project, folder)
    assert code == 1
    assert "not a notebook: not JSON" in err
