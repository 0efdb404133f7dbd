"""Lighthouse on typical pages, without its clock. `make lighthouse` asks it of every page."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import lighthouse, npm
from .sites import TYPICAL, Sites

POOR = """<!doctype html><html><head></head><body><img src="missing.png">
<p style="color: #bbb; background: white">Hardly legible.</p></body></html>"""


@pytest.fixture(scope="session", autouse=True)
def _installed() -> None:
    try:
        lighthouse.install()
    except npm.UnavailableError as reason:
        pytest.skip(f"no Lighthouse: {reason}")


def imperfect(site: Path, pages: list[str]) -> dict[str, list[str]]:
    found = list(lighthouse.look(site, pages, lighthouse.UNTIMED))
    assert [page["page"] for page in found] == pages
    return {
        page["page"]: page["failed"] or [str(page["error"])]
        for page in found
        if page["scores"] != dict.fromkeys(lighthouse.UNTIMED, 100)
    }


def test_a_poor_page_is_told(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(POOR, encoding="utf-8")
    (failed,) = imperfect(tmp_path, ["index.html"]).values()
    told = {reason.split()[0] for reason in failed}
    assert {"image-alt", "color-contrast", "errors-in-console", "meta-description"} <= told


def test_pages_have_full_marks(sites: Sites) -> None:
    assert imperfect(sites["book-plain"], sorted(TYPICAL)) == {}
