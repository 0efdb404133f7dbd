"""Execute runs and save their recordings.

    python tools/record.py 05-ring
    python tools/record.py --stale --data-dir path/to/mrpc

A recording is only saved if every cell, and so every assertion, passes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NoReturn

import check
import digest
import scrub

ROOT = digest.ROOT
VALUES = "application/vnd.miniddp.values+json"
FACTS = "application/json"
TRACEBACK_LINES = 12
OPTIONAL_PACKAGES = ("transformers", "datasets", "tokenizers")

# Executed in the run's kernel after its last cell, and not saved.
ASK_FACTS = """
import sys
import book
from IPython.display import display
from ipykernel.compiler import get_file_name
_torch = sys.modules.get("torch")
if (book.facts["provenance"] or {}).get("device") == "cuda":
    import torch as _torch
_cuda = _torch is not None and _torch.cuda.is_available()
_used_cuda = _cuda and _torch.cuda.is_initialized()  # asking for names initialises it
display({"application/json": {
    **book.facts,
    "gpus": [_torch.cuda.get_device_name(i) for i in range(_torch.cuda.device_count())]
    if _cuda else [],
    "used_cuda": _used_cuda,
    "cuda": _torch.version.cuda if _cuda else None,
    "cell_files": [get_file_name(code) for code in In],
    "imported": sorted({name.partition(".")[0] for name in sys.modules}),
}}, raw=True)
"""


class RecordError(Exception):
    """Why a run could not be recorded, in a line or with the end of a traceback."""


# One run


def record(root: Path, run: str, options: argparse.Namespace) -> Path:
    """Execute one run and save its recording; returns the file."""
    path = root / "runs" / f"{run}.py"
    symbols = digest.symbols(root, run)
    reached = digest.reached_source(root, run)
    commit, dirty = commit_of(root, list(reached), options.commit, options.allow_dirty)
    cells = digest.cells(path.read_text(encoding="utf-8"), path.name)
    print(f"{run}:", flush=True)
    started = time.monotonic()
    notebook, facts = execute(root, run, cells, options.data_dir, options.timeout)
    seconds = time.monotonic() - started
    kind = kind_of(facts)
    command = f"make record RUN={run}"
    if facts["data_used"]:
        command += " DATA_DIR=path/to/mrpc"
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
            "versions": versions(facts, "\n".join(reached.values())),
            "data": data_digest(options.data_dir) if facts["data_used"] else None,
            "commit": commit,
            "dirty": dirty,
            "date": datetime.now(timezone.utc).date().isoformat(),
            "command": command,
            "seconds": round(seconds, 1),
            "symbols": symbols,
        },
    }
    words = scrub.vocabulary([root / "src", root / "runs"])
    places = cell_places(run, cells, notebook, facts["cell_files"])
    clean(notebook, scrub.Scrubber(root, options.data_dir, words, places))
    refuse_bad_notebook(notebook)
    if digest.symbols(root, run) != symbols:
        raise RecordError("the code changed while the run was executed: record it again")
    return save(notebook, (options.output or root / "recordings") / f"{run}.{kind}.ipynb")


def execute(
    root: Path, run: str, cells: list[digest.Cell], data_dir: Path | None, timeout: float
) -> tuple[Any, dict[str, Any]]:
    """Run every code cell in a new kernel of this Python; the notebook and what ran."""
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    logging.getLogger("traitlets").setLevel(logging.CRITICAL)
    notebook = new_notebook(cells)
    with tempfile.TemporaryDirectory() as folder:
        write_kernelspec(Path(folder) / "recording")
        client = NotebookClient(notebook, timeout=timeout, record_timing=False)
        client.km = AsyncKernelManager(
            kernel_name="recording",
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[folder]),
            **({"transport": "ipc", "ip": f"{folder}/kernel"} if os.name == "posix" else {}),
        )
        environment = kernel_environment(root, run, data_dir, Path(folder))
        with client.setup_kernel(env=environment, cwd=str(root)):
            for number, (cell, node) in enumerate(zip(cells, notebook.cells, strict=True)):
                if cell.kind != "code" or not cell.source:
                    continue
                print(f"  {label(cell):<44}", end="", flush=True)
                started = time.monotonic()
                try:
                    client.execute_cell(node, number)
                except CellExecutionError as error:
                    refuse(cells, notebook, number, failure_lines(error, node), root)
                except CellTimeoutError:
                    refuse(cells, notebook, number, f"ran longer than {timeout:g} s", root)
                except DeadKernelError:
                    refuse(cells, notebook, number, "the Python process died", root)
                print(f"{time.monotonic() - started:8.1f} s", flush=True)
            return notebook, ask_facts(client)


def new_notebook(cells: list[digest.Cell]) -> Any:
    from nbformat import v4

    made = []
    for number, cell in enumerate(cells, 1):
        metadata = {"name": cell.name} if cell.name else {}
        proper_name = re.fullmatch(r"[\w-]{1,64}", cell.name or "", re.ASCII)
        identity = cell.name if proper_name else f"cell-{number:02d}"
        new = {"code": v4.new_code_cell, "markdown": v4.new_markdown_cell}.get(
            cell.kind, v4.new_raw_cell
        )
        made.append(new(cell.source, id=identity, metadata=metadata))
    return v4.new_notebook(cells=made)


def write_kernelspec(folder: Path) -> None:
    """A kernel of the running interpreter, so that none needs to be installed."""
    folder.mkdir()
    arguments = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": arguments, "display_name": "recording", "language": "python"}
    (folder / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")


def kernel_environment(
    root: Path, run: str, data_dir: Path | None, scratch: Path
) -> dict[str, str]:
    quiet = ["ignore:IProgress not found", os.environ.get("PYTHONWARNINGS", "")]
    search = [str(root / "src"), str(root / "runs"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(part for part in search if part),
        "PYTHONWARNINGS": ",".join(part for part in quiet if part),
        "MINIDDP_RUN": run,
        "IPYTHONDIR": str(scratch / "ipython"),
        "MPLBACKEND": "agg",
        "NO_COLOR": "1",
    }
    environment.pop("MINIDDP_DATA_DIR", None)
    if data_dir:
        environment["MINIDDP_DATA_DIR"] = str(data_dir)
    return environment


def ask_facts(client: Any) -> dict[str, Any]:
    from nbformat import v4

    cell = v4.new_code_cell(ASK_FACTS)
    client.nb.cells.append(cell)
    try:
        client.execute_cell(cell, len(client.nb.cells) - 1)
    finally:
        client.nb.cells.pop()
    return next(output.data[FACTS] for output in cell.outputs if FACTS in output.get("data", {}))


def label(cell: digest.Cell) -> str:
    return (cell.name or cell.source.lstrip().splitlines()[0])[:42]


# Failures


def failure_lines(error: Any, node: Any) -> str:
    outputs = [output for output in node.outputs if output.output_type == "error"]
    lines = outputs[-1].traceback if outputs else [f"{error.ename}: {error.evalue}"]
    return scrub.ESCAPE.sub("", "\n".join(lines))


def refuse(cells: list[digest.Cell], notebook: Any, number: int, what: str, root: Path) -> NoReturn:
    """Raise RecordError with the cell, its source line and the end of the traceback."""
    print("   failed", flush=True)
    cell, line = failing_line(cells, notebook, number, what)
    source = cell.source.split("\n")[line - cell.line].strip()
    name = f'cell "{cells[number].name}"' if cells[number].name else f"cell {number + 1}"
    tail = [text for text in scrub.Scrubber(root).text(what).split("\n") if text.strip()]
    shown = "\n".join(f"    {text}" for text in tail[-TRACEBACK_LINES:])
    raise RecordError(f"{name} failed at line {line}: {source}\n{shown}")


def failing_line(
    cells: list[digest.Cell], notebook: Any, number: int, what: str
) -> tuple[digest.Cell, int]:
    """The innermost line of the run in a traceback; else the first line of the cell."""
    by_count = {
        node.execution_count: cell
        for cell, node in zip(cells, notebook.cells, strict=True)
        if node.get("execution_count")
    }
    for count, line in reversed(re.findall(r"Cell In\[(\d+)\], line (\d+)", what)):
        if cell := by_count.get(int(count)):
            return cell, min(cell.line + int(line) - 1, cell.last_line)
    return cells[number], cells[number].line


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


def versions(facts: dict[str, Any], source: str) -> dict[str, str]:
    """Versions of what the run imported, in its own process or in that of a rank."""
    from importlib import metadata

    found = {"python": platform.python_version()}
    wanted = [name for name in ("torch", "miniddp", "numpy") if name in facts["imported"]]
    wanted += [
        name
        for name in OPTIONAL_PACKAGES
        if name in facts["imported"] or re.search(rf"(?m)^\s*(from|import) {name}\b", source)
    ]
    for name in wanted:
        try:
            found[name] = metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            if name == "miniddp":
                found[name] = own_version()
    if facts["cuda"]:
        found["cuda"] = facts["cuda"]
    return found


def own_version() -> str:
    source = (ROOT / "src/miniddp/__init__.py").read_text(encoding="utf-8")
    match = re.search(r'(?m)^__version__ = "([^"]+)"', source)
    return match[1] if match else "unknown"


def data_digest(folder: Path) -> dict[str, str]:
    """The name and the digest of the data files in a folder: of their names and contents."""
    whole = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".txt", ".tsv", ".csv", ".json", ".jsonl", ".parquet", ".arrow"):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            whole.update(f"{path.relative_to(folder).as_posix()} {content}\n".encode())
    return {"name": "MRPC", "sha256": whole.hexdigest()}


def commit_of(
    root: Path, files: list[Path], given: str | None, allow_dirty: bool
) -> tuple[str, bool]:
    """The commit that is recorded, and whether the run's code differs from it."""
    given = given or os.environ.get("MINIDDP_COMMIT")
    if not shutil.which("git") or not (root / ".git").exists():
        if not given or not re.fullmatch(r"[0-9a-f]{40}", given):
            raise RecordError("no git repository here: give --commit with 40 hex digits")
        return given, allow_dirty
    commit = git(root, "rev-parse", "HEAD").strip()
    if given and given != commit:
        raise RecordError(f"--commit is {given}, but the repository is at {commit}")
    changed = {line[3:] for line in git(root, "status", "--porcelain", "-uall").splitlines()}
    used = {path.relative_to(root).as_posix() for path in files} | {"runs/book.py"}
    used |= {path for path in changed if path.startswith("src/") and not path.endswith(".py")}
    dirty = sorted(changed & used)
    if dirty and not allow_dirty:
        raise RecordError(f"not committed: {', '.join(dirty)} (commit, or give --allow-dirty)")
    return commit, bool(dirty)


def git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if result.returncode:
        raise RecordError(f"git {arguments[0]} failed: {result.stderr.strip().splitlines()[-1]}")
    return result.stdout


# The notebook that is saved


def cell_places(
    run: str, cells: list[digest.Cell], notebook: Any, files: list[str]
) -> dict[str, tuple[str, int]]:
    """Where in the run the temporary file of each executed cell came from."""
    return {
        files[node.execution_count]: (f"runs/{run}.py", cell.line)
        for cell, node in zip(cells, notebook.cells, strict=True)
        if node.get("execution_count")
    }


def clean(notebook: Any, scrubber: scrub.Scrubber) -> None:
    """Leave in the outputs only what belongs to the book, in a stable order."""
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        cell.metadata.pop("execution", None)
        cell.outputs = merged(cell.outputs)
        for output in cell.outputs:
            if output.output_type == "stream":
                output.text = scrubber.text(output.text)
            else:
                output.data = scrubber.bundle(output.data)
                output.metadata = {}


def merged(outputs: list[Any]) -> list[Any]:
    """Neighbouring texts as one per stream: how they were cut depends on timing."""
    found: list[Any] = []
    streams: dict[str, Any] = {}
    for output in outputs:
        if output.output_type != "stream":
            streams = {}
            found.append(output)
        elif output.name in streams:
            streams[output.name].text += output.text
        else:
            streams[output.name] = output
            found.append(output)
            if output.name == "stdout" and "stderr" in streams:
                found[-2:] = [found[-1], found[-2]]
    return found


def refuse_bad_notebook(notebook: Any) -> None:
    import nbformat

    keys = [
        key
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        for key in output.get("data", {}).get(VALUES, {})
    ]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise RecordError(f"record() was given {twice[0]!r} twice, expected each key once")
    if traces := check.machine_traces(notebook):
        raise RecordError(f"the recording would still hold {traces[0]}")
    nbformat.validate(notebook)


def save(notebook: Any, path: Path) -> Path:
    """Write beside the old recording, then take its place."""
    import nbformat

    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            file.write(nbformat.writes(notebook).rstrip("\n") + "\n")
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


# Command line


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"record.py: {message} (see --help)\n")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="such as 05-ring")
    parser.add_argument("--all", action="store_true", help="record every run")
    parser.add_argument("--stale", action="store_true", help="record what is stale or missing")
    parser.add_argument("--data-dir", type=Path, help="folder with the MRPC files")
    parser.add_argument("--output", type=Path, help="save in this folder instead of recordings/")
    parser.add_argument("--timeout", type=float, default=900, help="seconds per cell (900)")
    parser.add_argument("--allow-dirty", action="store_true", help="record uncommitted code")
    parser.add_argument("--commit", help="the commit of this copy, where there is no git")
    options = parser.parse_args(arguments)
    if options.timeout <= 0:
        parser.error("--timeout must be positive")
    if options.data_dir:
        if not options.data_dir.is_dir():
            parser.error(f"--data-dir: no folder {options.data_dir}")
        options.data_dir = options.data_dir.resolve()
    if options.output:
        options.output = options.output.resolve()
        if not options.output.is_dir():
            parser.error(f"--output: no folder {options.output}")
    return options


def selected(root: Path, options: argparse.Namespace) -> list[str]:
    names = digest.run_names(root)
    known = ", ".join(names) or "none yet"
    if options.all:
        return names
    if options.stale:
        kind = "gpu" if has_gpu() else "cpu"
        return [run for run, status in check.status(root).items() if status[kind] != "fresh"]
    if not options.runs:
        raise RecordError(f"name a run, or give --all or --stale; the runs are {known}")
    runs = [Path(run).stem for run in options.runs]
    for run in runs:
        if run not in names:
            raise RecordError(f"no run named {run!r}; the runs are {known}")
    return list(dict.fromkeys(runs))


def saved_as(root: Path, path: Path) -> str:
    return str(path.relative_to(root) if path.is_relative_to(root) else path.name)


def has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def refuse_missing_modules() -> None:
    from importlib.util import find_spec

    for name in ("nbclient", "nbformat", "ipykernel", "torch"):
        if not find_spec(name):
            raise RecordError(f"{name} is not installed: pip install 'miniddp[record]'")


def main(arguments: list[str], root: Path = ROOT) -> int:
    options = parse(arguments)
    failed = False
    try:
        runs = selected(root, options)
        refuse_missing_modules()
    except (RecordError, digest.DigestError) as error:
        print(f"record.py: {error}", file=sys.stderr)
        return 2
    for run in runs:
        started = time.monotonic()
        try:
            path = record(root, run, options)
        except (RecordError, digest.DigestError, OSError) as error:
            print(f"record.py: {run}: {error}", file=sys.stderr, flush=True)
            failed = True
            continue
        except KeyboardInterrupt:
            print(f"record.py: {run}: interrupted, nothing saved", file=sys.stderr)
            return 130
        print(f"  saved {saved_as(root, path)} ({time.monotonic() - started:.1f} s)", flush=True)
    if not runs:
        print("record.py: every recording is fresh")
    try:
        if not options.output:
            check.write_status(root)
    except (digest.DigestError, OSError) as error:
        print(f"record.py: {check.STATUS} not written: {error}", file=sys.stderr)
        failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
