"""Execute runs and save their recordings.

    python tools/record.py                          what is stale or missing, on the CPU
    python tools/record.py 05-ring --kind gpu
    python tools/record.py --kind gpu --output brought --budget 540 --data-dir path/to/mrpc
    python tools/record.py --merge brought          take over what another machine recorded
    python tools/record.py --prose 05-ring          bring texts up to date without executing
    python tools/record.py --accept 05-ring --reason "the loop became a function"

A recording is only saved if every cell, and so every assertion, passes. --accept declares that the
code still does what it did when it was recorded; the badge of the recording says so, with the
reason. --merge, --prose and --accept need Python's standard library only.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import arguments
import check
import digest
import execute
import ranks
import scrub
from execute import RecordError

ROOT = digest.ROOT
VALUES = "application/vnd.miniddp.values+json"
OPTIONAL_PACKAGES = ("transformers", "datasets", "tokenizers")
LEAST_SECONDS = 15.0  # no run is started with less of the budget left
# What a GPU says first; the other runs follow in the order of the book.
WORTH = ("10-repair", "07-buckets", "05-ring", "15-memory", "09-train", "11-scaling", "06-sync")
FAILURES = (RecordError, check.BadRecording, check.GitError, digest.DigestError, OSError)
DATA = {
    "folder": "MRPC, the original files",
    "hub": "MRPC, from the Hugging Face hub",
    "sample": "the sample that comes with miniddp",
}


# One run


def record(root: Path, run: str, options: argparse.Namespace, deadline: float) -> Path:
    """Execute one run and save its recording; returns the file."""
    import nbformat

    reach = digest.reach(root, run)
    commit = commit_of(root, reach.files, options.commit)
    cells = digest.notebook(root, run)
    print(f"{run}:", flush=True)
    started = time.monotonic()
    notebook, facts = execute.execute(root, run, cells, options, deadline)
    seconds = time.monotonic() - started
    kind = kind_of(facts)
    if kind != options.kind:
        raise RecordError(f"provenance says {kind}, expected {options.kind}")
    if kind == "cpu":  # elsewhere a run takes as many ranks as there are GPUs
        claims = ranks.of_run(digest.Project(root), run)
        for problem in ranks.problems(claims, facts["provenance"]["world_size"]):
            raise RecordError(problem)
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "miniddp": {
            "run": run,
            "kind": kind,
            "device": facts["gpus"][0] if kind == "gpu" else cpu_name(),
            "device_count": len(facts["gpus"]) if kind == "gpu" else 0,
            "world_size": facts["provenance"]["world_size"],
            "backend": facts["provenance"]["backend"],
            "versions": versions(facts, reach.files),
            "data": facts["data"] and {"source": facts["data"], "name": DATA[facts["data"]]},
            "commit": commit,
            "date": today(),
            "command": command_of(run, kind, facts["data"]),
            "seconds": round(seconds, 1),
            "symbols": reach.digests,
        },
    }
    words = scrub.vocabulary([root / "src", root / "runs"])
    places = execute.cell_places(run, cells, notebook, facts["cell_files"])
    execute.clean(notebook, scrub.Scrubber(root, options.data_dir, words, places))
    refuse_bad_notebook(notebook)
    nbformat.validate(notebook)
    if digest.symbols(root, run) != reach.digests:
        raise RecordError("the code changed while the run was executed: record it again")
    target = options.output or root / "recordings"
    return save(json.loads(nbformat.writes(notebook)), target / f"{run}.{kind}.ipynb")


def command_of(run: str, kind: str, data: str | None) -> str:
    parts = ["make record", f"RUN={run}"]
    parts += ["KIND=gpu"] if kind == "gpu" else []
    parts += ["DATA_DIR=path/to/mrpc"] if data == "folder" else []
    return " ".join(parts)


def today() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())


def uses_a_gpu(root: Path, run: str) -> bool:
    """Whether a run takes a GPU where there is one: its provenance() does not say ``"cpu"``."""
    for node in ast.walk(ast.parse((root / "runs" / f"{run}.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "provenance":
            given = [word.value for word in node.keywords if word.arg == "device"] + node.args[:1]
            return [ast.unparse(value) for value in given] != ["'cpu'"]
    return False


# Provenance


def kind_of(facts: dict[str, Any]) -> str:
    """``cpu`` or ``gpu``; refuses a run whose claim does not match the machine."""
    said = facts["provenance"]
    if said is None:
        raise RecordError("no cell calls provenance(device=…, world_size=…, backend=…) of book")
    if said["device"] == "cuda" and not facts["gpus"]:
        raise RecordError("provenance says cuda, but torch sees no GPU")
    if said["device"] == "cpu" and facts["used_cuda"]:
        raise RecordError("provenance says cpu, but the run used CUDA")
    return "gpu" if said["device"] == "cuda" else "cpu"


def cpu_name() -> str:
    """Such as ``2-core AMD EPYC 7B13 CPU``: the cores that this process may use."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file() and (match := re.search(r"model name\s*: (.+)", info.read_text())):
        name = match[1]
    name = re.sub(r"\((?:R|TM|tm)\)|@.*|\b\d+-Core\b|\b(?:CPU|Processor)\b", " ", name)
    usable = getattr(os, "sched_getaffinity", None)
    cores = len(usable(0)) if usable else os.cpu_count() or 1
    return f"{cores}-core {' '.join(name.split())} CPU"


def versions(facts: dict[str, Any], files: list[Path]) -> dict[str, str]:
    """Versions of what the run imported, in its own process or in that of a rank."""
    from importlib import metadata

    source = (ROOT / "src/miniddp/__init__.py").read_text(encoding="utf-8")
    own = re.search(r'(?m)^__version__ = "([^"]+)"', source)
    found = {"python": platform.python_version(), "miniddp": own[1] if own else "unknown"}
    code = "\n".join(path.read_text(encoding="utf-8") for path in files)
    late = set(re.findall(rf"(?m)^\s+(?:from|import) ({'|'.join(OPTIONAL_PACKAGES)})\b", code))
    known = ("torch", "numpy", *OPTIONAL_PACKAGES)
    wanted = [name for name in known if name in late.union(facts["imported"])]
    for name in wanted:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name).partition("+")[0]
    if facts["cuda"]:
        found["cuda"] = facts["cuda"]
    return found


def commit_of(root: Path, files: list[Path], given: str | None) -> str:
    """The commit that is recorded; RecordError if the run's code differs from it."""
    if not check.has_git(root):
        if not given or not re.fullmatch(r"[0-9a-f]{40}", given):
            raise RecordError("no git repository here: give --commit with 40 hex digits")
        return given
    commit = check.git(root, "rev-parse", "HEAD").strip()
    if given and given != commit:
        raise RecordError(f"--commit is {given}, but the repository is at {commit}")
    changed = set(check.git(root, "diff", "HEAD", "--name-only", "--no-renames").splitlines())
    changed.update(check.git(root, "ls-files", "--others", "--exclude-standard").splitlines())
    used = {path.relative_to(root).as_posix() for path in files} | {"runs/book.py"}
    used |= {path for path in changed if path.startswith("src/") and not path.endswith(".py")}
    if changed & used:
        raise RecordError(f"not committed: {', '.join(sorted(changed & used))}")
    return commit


# What is saved


def refuse_bad_notebook(notebook: Any) -> None:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    keys = [key for output in outputs for key in output.get("data", {}).get(VALUES, {})]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise RecordError(f"record() was given {twice[0]!r} twice, expected each key once")
    if traces := check.machine_traces(notebook):
        raise RecordError(f"the recording would still hold {traces[0]}")


def save(notebook: dict[str, Any], path: Path) -> Path:
    """Write beside the old recording, then take its place."""
    for cell in notebook["cells"]:
        if isinstance(cell["source"], str):
            cell["source"] = cell["source"].splitlines(keepends=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            json.dump(notebook, file, indent=1, ensure_ascii=False, sort_keys=True)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def write_pages(root: Path) -> None:
    """The pages of the recorded runs; Quarto wants those of a book to exist before it renders."""
    for run in digest.run_names(root):
        page, text = root / "runs" / f"{run}.qmd", check.page_text(root, run)
        is_recorded = any(check.recording_path(root, run, kind).exists() for kind in check.KINDS)
        if not is_recorded or (page.exists() and page.read_text(encoding="utf-8") == text):
            continue
        print(f"wrote runs/{run}.qmd{'' if page.exists() else ': name it in _quarto.yml'}")
        page.write_text(text, encoding="utf-8")


def saved_when(root: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in check.recordings(root)}


# Without executing


def refresh(root: Path, run: str, kind: str) -> str:
    """Give a recording the present texts of its run."""
    notebook = check.read_recording(check.recording_path(root, run, kind))
    if check.own_code_changed(root, notebook):
        raise RecordError("its own code changed: record it, or --accept it")
    return f"{save_with_texts(root, notebook)}: texts brought up to date"


def accept(root: Path, run: str, options: argparse.Namespace) -> str:
    """Take a recording for one of the present code, which is said to behave the same."""
    notebook = check.read_recording(check.recording_path(root, run, options.kind))
    carried = notebook["metadata"]["miniddp"]
    reach = digest.reach(root, run)
    if carried["symbols"] == reach.digests and not check.lost_commit(carried, check.history(root)):
        raise RecordError(
            f"its {options.kind.upper()} recording is fresh: there is nothing to accept"
        )
    commit = commit_of(root, reach.files, options.commit)
    said = {"reason": options.reason, "date": today(), "commit": commit}
    carried["accepted"] = [*carried.get("accepted", []), said]
    carried["symbols"] = reach.digests
    return f"{save_with_texts(root, notebook)}: accepted"


def save_with_texts(root: Path, notebook: dict[str, Any]) -> str:
    run, kind = (notebook["metadata"]["miniddp"][key] for key in ("run", "kind"))
    cells = execute.notebook_cells(digest.notebook(root, run))
    old = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    new = [cell for cell in cells if cell["cell_type"] == "code"]
    if len(old) != len(new):
        raise RecordError(f"it has {len(new)} code cells, the recording {len(old)}: record it")
    for was, cell in zip(old, new, strict=True):
        cell.update(execution_count=was["execution_count"], outputs=was["outputs"])
    path = save({**notebook, "cells": cells}, check.recording_path(root, run, kind))
    return path.relative_to(root).as_posix()


def merge(root: Path, path: Path) -> str:
    """Copy a recording that another machine made into recordings/; says what it is."""
    notebook = check.read_recording(path)
    carried = notebook["metadata"]["miniddp"]
    run, kind = carried["run"], carried["kind"]
    if problems := [*check.problems(root, path, check.history(root))]:
        raise RecordError(problems[0])
    if digest.of_notebook(notebook) != carried["symbols"][f"runs/{run}.py"]:
        raise RecordError("its code was altered after it was recorded")
    is_stale = carried["symbols"] != digest.symbols(root, run)
    if is_stale and check.freshness(root, run, kind)[0] == "fresh":
        raise RecordError("it is stale, and the recording that is there is fresh")
    save(notebook, check.recording_path(root, run, kind))
    return (
        f"{carried['device']}, torch {carried['versions'].get('torch', '?')}, {carried['date']}, "
        f"commit {carried['commit'][:7]}, {'stale' if is_stale else 'fresh'}"
    )


# Command line


def parse(given: list[str]) -> argparse.Namespace:
    parser = arguments.Parser(__doc__)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="such as 05-ring")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--prose", action="store_true", help="only bring the texts up to date")
    mode.add_argument("--accept", action="store_true", help="declare the behaviour unchanged")
    mode.add_argument("--merge", type=folder, metavar="FOLDER", help="take over its recordings")
    parser.add_argument("--reason", default="", help="why the behaviour is unchanged")
    parser.add_argument("--kind", choices=check.KINDS, default="cpu", help="(cpu)")
    parser.add_argument("--data-dir", type=folder, help="folder with the MRPC files")
    parser.add_argument("--output", type=Path, help="save in this folder instead of recordings/")
    parser.add_argument("--timeout", type=seconds, default=1800, help="seconds per cell (1800)")
    parser.add_argument("--budget", type=seconds, metavar="SECONDS", help="for all runs together")
    parser.add_argument("--commit", help="the commit of this copy, where there is no git")
    options = parser.parse_args(given)
    if options.accept and not (options.runs and options.reason.strip()):
        parser.error('--accept needs a RUN and --reason "…"')
    if options.runs and options.merge:
        parser.error("--merge takes no RUN")
    if options.output:
        options.output = options.output.resolve()
    return options


def folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"no folder {text}")
    return Path(text).resolve()


def seconds(text: str) -> float:
    if float(text) <= 0:
        raise argparse.ArgumentTypeError("must be positive")
    return float(text)


def selected(root: Path, options: argparse.Namespace) -> list[str]:
    """The runs that are named; else those without a fresh recording of this kind."""
    known = digest.run_names(root)
    runs = list(dict.fromkeys(Path(run).stem for run in options.runs))
    for run in runs:
        if run not in known:
            there = ", ".join(known) or "none yet"
            raise RecordError(f"no run named {run!r}; the runs are {there}")
    able = [run for run in known if options.kind == "cpu" or uses_a_gpu(root, run)]
    if without := sorted({*runs} - {*able}):
        raise RecordError(f"{without[0]} runs on the CPU only, its provenance() says")
    if runs:
        return runs
    able = [run for run in able if check.freshness(root, run, options.kind)[0] != "fresh"]
    first = [run for run in WORTH if run in able] if options.kind == "gpu" else []
    return first + [run for run in able if run not in first]


def refuse_this_machine(kind: str) -> None:
    from importlib.util import find_spec

    for name in ("nbclient", "nbformat", "ipykernel", "torch"):
        if not find_spec(name):
            raise RecordError(f"{name} is not installed: pip install --group record -e .")
    if kind == "gpu" and not has_gpu():
        raise RecordError("torch sees no GPU here")


def refuse_folder(folder: Path) -> None:
    """Make it; RecordError if no file can be made in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        reason = f"nothing can be saved in {folder}: {error.strerror}"
        raise RecordError(f"{reason} (--output names another folder)") from None


def has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def each(items: Iterable[Any], act: Callable[[Any], str]) -> bool:
    """Do it to each, and print what came of it; whether all went well."""
    failed = False
    for item in items:
        try:
            print(act(item), flush=True)
        except FAILURES as error:
            failed = True
            name = getattr(item, "name", item)
            print(f"record.py: {name}: {error}", file=sys.stderr, flush=True)
    return not failed


def record_all(root: Path, runs: list[str], options: argparse.Namespace) -> bool:
    """Record the runs, as far as the budget goes; whether all went well."""
    deadline = time.monotonic() + (options.budget or float("inf"))

    def record_in_time(run: str) -> str:
        started = time.monotonic()
        if deadline - started < LEAST_SECONDS:
            raise RecordError("not started: no time")
        path = record(root, run, options, deadline)
        return f"  saved {path.parent.name}/{path.name} ({time.monotonic() - started:.1f} s)"

    if runs:
        refuse_this_machine(options.kind)
        refuse_folder(options.output or root / "recordings")
    return each(runs, record_in_time)


def run_command(root: Path, options: argparse.Namespace) -> bool:
    """Do what the options say; whether all went well."""
    if options.merge:
        paths = sorted(options.merge.glob("*.ipynb"))
        if not paths:
            raise RecordError(f"no recording in {options.merge.name}")
        return each(paths, lambda path: f"{path.name}: {merge(root, path)}")
    if options.accept:
        return each(selected(root, options), lambda run: accept(root, run, options))
    if options.prose and options.runs:
        return each(selected(root, options), lambda run: refresh(root, run, options.kind))
    runs = [] if options.prose else selected(root, options)
    whole = record_all(root, runs, options)
    if options.runs or options.output:
        return whole
    others = [run for run in digest.run_names(root) if run not in runs]
    older = [run for run in others if check.texts_differ(root, run, options.kind)]
    if not runs and not older:
        print("record.py: every recording is fresh")
    return each(older, lambda run: refresh(root, run, options.kind)) and whole


def main(given: list[str], root: Path = ROOT) -> int:
    options = parse(given)
    before = saved_when(root)
    try:
        whole = run_command(root, options)
        if saved_when(root) != before:
            write_pages(root)
            check.write_status(root)
    except FAILURES as error:
        print(f"record.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, RecordError) else 1
    except KeyboardInterrupt:
        print("record.py: interrupted, nothing saved of the last run", file=sys.stderr)
        return 130
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
