"""A small book to try the extension on: the folder `fixture` with the real extension in it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pypandoc
import pytest

HERE = Path(__file__).parent
EXTENSION = HERE.parents[2] / "_extensions" / "ddp-book"
VERSION = tuple(int(part) for part in pypandoc.get_pandoc_version().split(".")[:2])
NO_HIGHLIGHT = "--syntax-highlighting=none" if VERSION >= (3, 8) else "--no-highlight"

Render = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """The book's folder, with the pages of `cases` in it."""
    root = tmp_path / "book"
    shutil.copytree(HERE / "fixture", root)
    shutil.copytree(HERE / "cases", root, dirs_exist_ok=True)
    shutil.copytree(EXTENSION, root / "_extensions" / "ddp-book")
    return root


@pytest.fixture
def render(book: Path) -> Render:
    """Render a page of the book, first written if `text` is given, with Pandoc alone."""

    def run(page: str, text: str | None = None, folder: str = ".", to: str = "html5"):
        if text is not None:
            (book / page).write_text(text, encoding="utf-8")
        working = book / folder
        up = Path(*[".."] * len(Path(folder).parts))
        command = [pypandoc.get_pandoc_path(), "--from", "markdown", "--to", to, "--wrap=none"]
        command += [NO_HIGHLIGHT, "--lua-filter", str(up / "_extensions/ddp-book/book.lua")]
        command += [str((book / page).relative_to(working))]
        return subprocess.run(
            command, cwd=working, capture_output=True, encoding="utf-8", timeout=60
        )

    return run
