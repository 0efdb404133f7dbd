"""Three pages that hold what matters most, letter by letter: code, outputs, what others measured.

After a deliberate change: `UPDATE_GOLDEN=1 pytest tests/book/extension`, then read the difference.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", ["05-code", "05-run", "05-measured"])
def test_page(render, name):
    done = render(f"chapters/{name}.qmd")
    assert done.returncode == 0, done.stderr
    golden = GOLDEN / f"{name}.html"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(done.stdout, encoding="utf-8")
    assert done.stdout == golden.read_text(encoding="utf-8")


def test_the_working_folder_does_not_matter(render):
    page = "chapters/05-run.qmd"
    assert render(page, folder="chapters").stdout == render(page).stdout
