"""tools/record.py beyond one run: budgets, other machines, texts, declared behaviour."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.book.tools.recorder import COMMIT, call, make_project

import check
import ranks
import record

ROOT = Path(record.__file__).parent.parent
QUICK = """# %% [markdown]
# # Quick

# %%
from book import provenance
from miniddp import double
provenance(device=str("cpu"), world_size=1, backend=None)
print(double(2))
"""
FIXED = '# %%\nfrom book import provenance\nprovenance(device="cpu", world_size=1, backend=None)\n'
LONG = f"""{QUICK}
import os, time
from pathlib import Path
Path("kernel").write_text(str(os.getpid()))
time.sleep(600)
"""


def test_a_gpu_takes_the_runs_that_use_one_in_the_order_of_their_worth(monkeypatch):
    monkeypatch.setattr(check, "freshness", lambda *_: ("missing", []))
    options = record.parse(["--kind", "gpu"])
    runs = record.selected(ROOT, options)
    first = [run for run in runs if run in record.WORTH]
    assert runs[: len(first)] == first == [run for run in record.WORTH if run in runs]
    assert runs[len(first) :] == sorted(runs[len(first) :])
    assert {"06-sync", "05-ring"} <= set(runs)


def test_a_run_that_says_cpu_is_not_recorded_on_a_gpu(tmp_path):
    project = make_project(tmp_path, **{"01-fixed": FIXED, "02-any": QUICK})
    assert record.selected(project, record.parse(["--kind", "gpu"])) == ["02-any"]
    assert record.selected(project, record.parse([])) == ["01-fixed", "02-any"]
    with pytest.raises(record.RecordError, match="01-fixed runs on the CPU only"):
        record.selected(project, record.parse(["01-fixed", "--kind", "gpu"]))


def test_without_a_gpu_nothing_is_recorded_as_one(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "has_gpu", lambda: False)
    project = make_project(tmp_path, **{"01-any": QUICK})
    code, _, err = call(project, "--kind", "gpu")
    assert (code, err) == (2, "record.py: torch sees no GPU here\n")


def test_a_spent_budget_ends_the_run_and_starts_no_other(tmp_path):
    project = make_project(tmp_path, **{"02-long": LONG, "03-quick": QUICK})
    code, out, err = call(project, "--output", str(project / "home"), "--budget", "20")
    assert code == 1, out + err
    assert err.splitlines() == [
        "record.py: 02-long: stopped: the budget was spent",
        "record.py: 03-quick: not started: no time",
    ]
    assert [*(project / "home").iterdir()] == []
    assert not (project / "recordings").exists(), "the book's own recordings stay"
    kernel = int((project / "kernel").read_text())
    assert not Path(f"/proc/{kernel}").exists() or sys.platform != "linux"


@pytest.mark.parametrize("arguments", [[], ["--output", "{project}/home"]])
def test_a_folder_that_cannot_be_written_is_one_line_before_anything_is_executed(
    tmp_path, arguments
):
    project = make_project(tmp_path, **{"01-quick": QUICK})
    folder = project / ("home" if arguments else "recordings")
    folder.touch()
    given = (each.format(project=project) for each in arguments)
    code, out, err = call(project, "01-quick", *given)
    assert (code, out) == (2, "")
    assert err == (
        f"record.py: nothing can be saved in {folder}: File exists "
        "(--output names another folder)\n"
    )


def test_another_folder_gets_the_recordings_within_a_budget(tmp_path):
    project = make_project(tmp_path, **{"01-quick": QUICK})
    code, out, err = call(project, "--output", str(project / "home"), "--budget", "170")
    assert code == 0, out + err
    assert [path.name for path in (project / "home").iterdir()] == ["01-quick.cpu.ipynb"]
    assert not (project / "recordings").exists(), "the book's own recordings stay"


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """The recording of a small run."""
    project = make_project(tmp_path_factory.mktemp("quick"), **{"01-quick": QUICK})
    code, out, err = call(project, "01-quick")
    assert code == 0, out + err
    return check.read_recording(project / "recordings/01-quick.cpu.ipynb")


@pytest.fixture
def project(tmp_path, quick):
    """A project with a fresh recording."""
    folder = make_project(tmp_path / "project", **{"01-quick": QUICK})
    record.save(quick, folder / "recordings/01-quick.cpu.ipynb")
    record.write_pages(folder)
    check.write_status(folder)
    return folder


def recording(project: Path, kind: str = "cpu") -> dict:
    return check.read_recording(project / f"recordings/01-quick.{kind}.ipynb")


# Texts and behaviour


def stale(project: Path) -> list[str]:
    return list(check.freshness_problems(project, check.states(project), ranks.of_runs(project)))


@pytest.mark.parametrize("arguments", [[], ["--prose"], ["--prose", "01-quick"]])
def test_texts_are_brought_up_to_date_without_executing(project, arguments):
    before = recording(project)
    text = QUICK.replace("# # Quick", "# # Quicker\n\n# %% [markdown]\n# More.")
    (project / "runs/01-quick.py").write_text(text.replace("print(", "# shown\nprint("))
    assert check.freshness(project, "01-quick", "cpu") == ("fresh", [])
    assert stale(project) == [
        "recordings/01-quick.cpu.ipynb lacks the latest texts of its run (make prose RUN=01-quick)"
    ]
    code, out, _ = call(project, *arguments)
    assert (code, out.splitlines()) == (
        0,
        ["recordings/01-quick.cpu.ipynb: texts brought up to date", "wrote runs/01-quick.qmd"],
    )
    assert 'title: "Run 01-quick: Quicker"' in (project / "runs/01-quick.qmd").read_text()
    assert stale(project) == []
    after = recording(project)
    assert [cell["id"] for cell in after["cells"]] == ["cell-01", "cell-02", "cell-03"]
    assert after["cells"][0]["source"] == ["# Quicker"]
    assert after["cells"][2]["source"][-2:] == ["# shown\n", "print(double(2))"]
    assert after["cells"][2]["outputs"] == before["cells"][1]["outputs"]
    assert after["metadata"] == before["metadata"]
    assert list(check.recording_problems(project)) == []


def test_texts_of_other_code_are_refused(project):
    (project / "runs/01-quick.py").write_text(QUICK + "print(3)\n")
    code, _, err = call(project, "--prose", "01-quick")
    assert code == 1
    assert err == "record.py: 01-quick: its own code changed: record it, or --accept it\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["01-quick"],
        ["--prose", "01-quick"],
        ["--accept", "01-quick", "--reason", "none"],
        ["--kind", "gpu"],
    ],
)
def test_a_refused_command_changes_nothing(project, arguments, monkeypatch):
    def refuse(*_):
        raise record.RecordError("not committed")

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in project.rglob("*") if path.is_file()}

    monkeypatch.setattr(record, "commit_of", refuse)
    (project / "runs/01-quick.py").write_text(QUICK.replace("# # Quick", "# # Slow") + "print(3)\n")
    before = files()
    assert call(project, *arguments)[0] != 0
    assert files() == before


def test_behaviour_can_be_declared_unchanged(project):
    arguments = ["01-quick", "--accept", "--reason", "added the other way round"]
    code, _, err = call(project, *arguments)
    assert code == 1
    assert err == ("record.py: 01-quick: its CPU recording is fresh: there is nothing to accept\n")
    (project / "src/miniddp/__init__.py").write_text("def double(x):\n    return x * 2\n")
    (project / "runs/01-quick.py").write_text(QUICK.replace("str(", "('').join("))
    assert check.freshness(project, "01-quick", "cpu")[0] == "stale"
    code, out, err = call(project, *arguments)
    assert (code, out) == (0, "recordings/01-quick.cpu.ipynb: accepted\n"), err
    assert check.freshness(project, "01-quick", "cpu")[0] == "fresh"
    assert "('').join(" in "".join(recording(project)["cells"][1]["source"])
    assert recording(project)["metadata"]["miniddp"]["accepted"] == [
        {"reason": "added the other way round", "date": record.today(), "commit": COMMIT}
    ]
    (project / "runs/01-quick.py").write_text(QUICK + "# %%\n1\n")
    code, _, err = call(project, *arguments)
    assert code == 1
    assert "it has 2 code cells, the recording 1: record it" in err


def test_a_commit_that_a_squash_took_away_is_named_and_can_be_replaced(project):
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        command = ["git", "-C", project, *identity, *arguments]
        done = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "all")
    (problem,) = check.recording_problems(project)
    assert problem.startswith(
        "recordings/01-quick.cpu.ipynb: commit 0123456 is not in the history of this branch"
    )
    arguments = ["01-quick", "--accept", "--reason", "merged as one commit"]
    assert record.main(arguments, project) == 0
    assert list(check.recording_problems(project)) == []
    (said,) = recording(project)["metadata"]["miniddp"]["accepted"]
    assert said["commit"] == git("rev-parse", "HEAD")


# Recordings of another machine


@pytest.fixture
def brought(project, tmp_path):
    """A project, and a folder with a recording that was made for it on an imagined GPU."""
    notebook = recording(project)
    notebook["metadata"]["miniddp"].update(kind="gpu", device="Test GPU", device_count=1)
    folder = tmp_path / "brought"
    record.save(notebook, folder / "01-quick.gpu.ipynb")
    return project, folder, notebook


def merge(project: Path, folder: Path) -> tuple[int, str, str]:
    return call(project, "--merge", str(folder))


def test_merge_takes_a_recording_and_updates_the_status(brought):
    project, folder, _ = brought
    code, out, err = merge(project, folder)
    assert code == 0, err
    assert "01-quick.gpu.ipynb: Test GPU, torch" in out
    assert "commit 0123456, fresh" in out
    status = json.loads((project / "recordings/status.json").read_text())
    assert (status["01-quick"]["cpu"], status["01-quick"]["gpu"]) == ("fresh", "fresh")


def test_merge_does_not_replace_a_fresh_recording_by_a_stale_one(brought):
    project, folder, notebook = brought
    assert merge(project, folder)[0] == 0
    before = (project / "recordings/01-quick.gpu.ipynb").read_bytes()
    notebook["metadata"]["miniddp"]["symbols"]["miniddp:double"] = "0" * 16
    (folder / "01-quick.gpu.ipynb").write_text(json.dumps(notebook))
    code, _, err = merge(project, folder)
    assert code == 1
    assert "it is stale, and the recording that is there is fresh" in err
    assert (project / "recordings/01-quick.gpu.ipynb").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"run": "02-other"}, "it says that it is 02-other on gpu"),
        ({"kind": "cpu"}, "it says that it is 01-quick on cpu"),
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
