"""Executes the cells of a run in a kernel of its own, and cleans what they put out.

Needs nbclient, nbformat and ipykernel.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

import digest
import scrub
from shrink_svg import shrink_svg

FACTS = "application/json"
TRACEBACK_LINES = 12

# Executed in the run's kernel after its last cell, and not saved.
ASK_FACTS = """
import sys
import book
from IPython.display import display
from ipykernel.compiler import get_file_name
_torch = sys.modules.get("torch")
if (book.facts["provenance"] or {}).get("device") == "cuda":
    import torch as _torch
if book.facts["data"] == "hub or sample":
    from finetune.data import load_mrpc
    book.facts["data"] = "hub" if "hub" in load_mrpc().info.description else "sample"
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


def execute(
    root: Path, run: str, cells: list[digest.Cell], options: argparse.Namespace, deadline: float
) -> tuple[Any, dict[str, Any]]:
    """Run every code cell in a new kernel of this Python; the notebook and what ran.

    A cell may take ``options.timeout`` seconds; none goes on after ``deadline`` (monotonic clock).
    """
    import nbformat
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    logging.getLogger("traitlets").setLevel(logging.CRITICAL)
    notebook = nbformat.from_dict(
        {"cells": notebook_cells(cells), "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    )
    with tempfile.TemporaryDirectory() as folder:
        write_kernelspec(Path(folder) / "recording")
        client = NotebookClient(notebook, record_timing=False)
        client.km = AsyncKernelManager(
            kernel_name="recording",
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[folder]),
            **({"transport": "ipc", "ip": f"{folder}/kernel"} if os.name == "posix" else {}),
        )
        environment = kernel_environment(root, run, options, Path(folder))
        with client.setup_kernel(env=environment, cwd=str(root)):
            for number, (cell, node) in enumerate(zip(cells, notebook.cells, strict=True)):
                if cell.kind != "code" or not cell.source:
                    continue
                print(f"  {label(cell):<44}", end="", flush=True)
                started = time.monotonic()
                client.timeout = math.ceil(max(1, min(options.timeout, deadline - started)))
                try:
                    client.execute_cell(node, number)
                except CellExecutionError as error:
                    refuse(cells, notebook, number, failure_lines(error, node), root)
                except CellTimeoutError:
                    if time.monotonic() >= deadline:
                        print("   stopped", flush=True)
                        raise RecordError("stopped: the budget was spent") from None
                    refuse(cells, notebook, number, f"ran longer than {options.timeout:g} s", root)
                except DeadKernelError:
                    refuse(cells, notebook, number, "the Python process died", root)
                print(f"{time.monotonic() - started:8.1f} s", flush=True)
            return notebook, ask_facts(client)


def notebook_cells(cells: list[digest.Cell]) -> list[dict[str, Any]]:
    """The cells of a run as those of a notebook that was not executed yet."""
    made = []
    for number, cell in enumerate(cells, 1):
        proper_name = re.fullmatch(r"[\w-]{1,64}", cell.name or "", re.ASCII)
        new = {
            "cell_type": cell.kind,
            "id": cell.name if proper_name else f"cell-{number:02d}",
            "metadata": {"name": cell.name} if cell.name else {},
            "source": cell.source,
        }
        made.append({**new, "execution_count": None, "outputs": []} if cell.kind == "code" else new)
    return made


def write_kernelspec(folder: Path) -> None:
    """A kernel of the running interpreter, so that none needs to be installed.

    What a child process prints goes to the terminal: ipykernel forwards it from a thread that may
    come after the cell's end, so that it was in the recording or not, as the timing had it.
    """
    folder.mkdir()
    arguments = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    arguments += ["--IPKernelApp.capture_fd_output=False"]
    spec = {"argv": arguments, "display_name": "recording", "language": "python"}
    (folder / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")


def kernel_environment(
    root: Path, run: str, options: argparse.Namespace, scratch: Path
) -> dict[str, str]:
    quiet = ["ignore:IProgress not found", os.environ.get("PYTHONWARNINGS", "")]
    folders = [str(root / name) for name in ("src", "runs", "stages")]
    search = [*folders, os.environ.get("PYTHONPATH", "")]
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
    if options.kind == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if options.data_dir:
        environment["MINIDDP_DATA_DIR"] = str(options.data_dir)
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


# Outputs


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
                if figure := output.data.get("image/svg+xml"):
                    output.data["image/svg+xml"] = shrink_svg("".join(figure))
                output.metadata = {}


def merged(outputs: list[Any]) -> list[Any]:
    """Neighbouring texts as one, stderr as the last: when either arrives depends on timing."""
    found: list[Any] = []
    errors = [output for output in outputs if output.get("name") == "stderr"]
    for output in (output for output in outputs if output not in errors):
        if output.output_type == "stream" and found and found[-1].output_type == "stream":
            found[-1].text += output.text
        else:
            found.append(output)
    if errors:
        errors[0].text = "".join(error.text for error in errors)
    return found + errors[:1]
