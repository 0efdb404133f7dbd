"""Python that is written by hand on a page runs as it stands; what is called broken does not."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from .pages import Fence, fences

WHOLE = [fence for fence in fences("python") if not fence.mark]
BROKEN = [fence for fence in fences("python") if fence.mark]


def run(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    program = folder / "block.py"
    program.write_text(text, encoding="utf-8")
    return subprocess.run(
        [sys.executable, program],
        cwd=folder,
        capture_output=True,
        encoding="utf-8",
        timeout=150,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )


@pytest.mark.parametrize("fence", WHOLE, ids=lambda fence: fence.place)
def test_a_block_runs_by_itself(fence: Fence, tmp_path: Path, executed: Counter[str]) -> None:
    done = run(fence.text, tmp_path)
    assert done.returncode == 0, done.stderr
    executed["Python blocks executed"] += 1


@pytest.mark.parametrize("fence", BROKEN, ids=lambda fence: fence.place)
def test_a_broken_block_is_python_and_fails(
    fence: Fence, tmp_path: Path, executed: Counter[str]
) -> None:
    ast.parse(fence.text)
    done = run(fence.text, tmp_path)
    assert done.returncode != 0, "it runs: it needs no broken=…"
    ends = done.stderr.strip().splitlines()[-1]
    executed[f'Python block with broken=… ("{fence.mark}") is valid, and fails: {ends}'] += 1
