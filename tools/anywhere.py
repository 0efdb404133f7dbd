"""The first cell of every notebook: it fetches the book's repository where there is none."""

from __future__ import annotations

from pathlib import Path

import address

NAME = "anywhere"
CELL = """\
# In a clone of the book's repository this does nothing. Elsewhere it fetches and installs one.
# {then}
import os
import subprocess
import sys

if os.path.exists("../runs/book.py"):
    os.chdir("..")
elif not os.path.exists("runs/book.py"):
    folder = "ddp-from-scratch"
    if not os.path.exists(folder):
        clone = ["git", "clone", "--quiet", "--depth=1", "--branch={branch}"]
        subprocess.run([*clone, "{repository}", folder], check=True)
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--editable"]
        needs = ["ipykernel", "matplotlib", "nbclient"]
        subprocess.run([*install, f"./{{folder}}[train]", *needs], check=True)
    os.chdir(folder)
sys.path[:0] = [os.path.abspath(folder) for folder in ("src", "runs", "stages")]"""
RECORD = (
    "A recording for the book: !python tools/record.py {run} --output brought  (GPU: --kind gpu)"
)


def source(root: Path, then: str) -> str | None:
    """The cell, with a second line of comment; None if _quarto.yml names no repository."""
    if not (root / address.HOME).is_file():
        return None
    named = address.current(root)
    if "repo-url" not in named:
        return None
    branch = named.get("repo-branch", "main")
    return CELL.format(then=then, repository=named["repo-url"], branch=branch)


def of_run(root: Path, run: str) -> str | None:
    return source(root, RECORD.format(run=run))
