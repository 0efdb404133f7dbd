"""Small projects to record, and tools/record.py called on them."""

import contextlib
import io
import shutil
from pathlib import Path

import book
import record

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def make_project(folder: Path, **runs: str) -> Path:
    (folder / "src/miniddp").mkdir(parents=True)
    (folder / "runs").mkdir()
    source = "def double(x):\n    return 2 * x\n"
    (folder / "src/miniddp/__init__.py").write_text(source)
    shutil.copy(book.__file__, folder / "runs/book.py")
    for name, text in runs.items():
        (folder / "runs" / f"{name}.py").write_text(text)
    return folder


def call(project: Path, *arguments: str) -> tuple[int, str, str]:
    """The exit status of record.py with what it printed to stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = record.main([*arguments, "--commit", COMMIT], project)
    return code, out.getvalue(), err.getvalue()
