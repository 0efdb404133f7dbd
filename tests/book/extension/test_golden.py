"""What the extension makes of every construct, compared with golden files.

After a deliberate change: `UPDATE_GOLDEN=1 pytest tests/extension`, then read the difference.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PAGES = sorted(str(path.relative_to(HERE / "cases")) for path in HERE.glob("cases/**/*.qmd"))


@pytest.mark.parametrize("page", PAGES)
def test_page(render, page):
    done = render(page)
    assert done.returncode == 0, done.stderr
    golden = (HERE / "golden" / page).with_suffix(".html")
    if os.environ.get("UPDATE_GOLDEN"):
        golden.parent.mkdir(parents=True, exist_ok=True)
        golden.write_text(done.stdout, encoding="utf-8")
    assert golden.exists(), f"no {golden}: make it with UPDATE_GOLDEN=1"
    assert done.stdout == golden.read_text(encoding="utf-8")


def test_every_golden_file_has_its_page():
    goldens = {path.relative_to(HERE / "golden") for path in HERE.glob("golden/**/*.html")}
    assert goldens == {Path(page).with_suffix(".html") for page in PAGES}


def test_the_working_folder_does_not_matter(render):
    page = "chapters/05-run.qmd"
    assert render(page, folder="chapters").stdout == render(page).stdout
