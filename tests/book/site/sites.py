"""Sites to look at in a browser: the book and a sample, each as plain build and, where Quarto is
on PATH, as Quarto build. BOOK_SITE names a folder with the book as one of them made it already.
Tests that run side by side share what one of them builds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from filelock import FileLock
from playwright.sync_api import Page

from plain import build

ROOT = Path(__file__).resolve().parents[3]
SAMPLE = Path(__file__).parent / "sample"
DESKTOP = {"width": 1280, "height": 900}
BUILDS = [f"{book}-{tool}" for book in ("book", "sample")
          for tool in ("plain", "quarto") if tool == "plain" or shutil.which("quarto")]  # fmt: skip


def page_urls(name: str) -> list[str]:
    """The site's pages; of a book that cannot be built, the first (its tests say why)."""
    source = SAMPLE if name.startswith("sample") else ROOT
    try:
        return [page.url for page in build.list_pages(build.read_config(source), source)]
    except build.BuildError:
        return ["index.html"]


# How a page behaves is one script for all of them: pages with everything that it moves are enough.
TYPICAL = {"index.html", "chapters/07-buckets.html", "chapters/14-clinic.html",
           "appendix/launching.html", "runs/05-ring.html"}  # fmt: skip
ALL = [(name, url) for name in BUILDS for url in page_urls(name)]
BEHAVIOUR = [(name, url) for name, url in ALL if name.startswith("sample") or url in TYPICAL]
PAGES = [*BEHAVIOUR, *(page for page in ALL if page not in BEHAVIOUR)]


@dataclass(frozen=True)
class Sites:
    """The folders of the sites, built when first asked for."""

    folder: Path
    built: dict[str, Path | str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Path:
        if name not in self.built:
            with FileLock(self.folder / f"{name}.lock"):
                self.built[name] = self.make(name)
        site = self.built[name]
        if isinstance(site, str):
            pytest.fail(site, pytrace=False)
        return site

    def make(self, name: str) -> Path | str:
        """The folder of the site, or why there is none."""
        book, tool = name.split("-")
        source, output = ROOT, self.folder / name
        made = Path(os.environ.get("BOOK_SITE", "none"))
        if book == "book" and made.exists() and (made / "plain").exists() == (tool == "plain"):
            return made
        if output.exists():
            return output
        if book == "sample":
            source = self.folder / f"{name}-source"
            shutil.copytree(SAMPLE, source)
            for shared in ("_extensions", "theme", "vis"):
                shutil.copytree(ROOT / shared, source / shared)
        command = [sys.executable, str(ROOT / "tools/plain/build.py"), str(source)]
        if tool == "quarto":
            command = ["quarto", "render", str(source), "--output-dir"]
        made = subprocess.run(
            [*command, str(output)], capture_output=True, encoding="utf-8", timeout=170
        )
        if made.returncode != 0:
            return f"{name} was not built: {made.stderr.strip().splitlines()[-1:]}"
        return output


@dataclass
class Visit:
    """A page in the browser, and what it asked for and complained about."""

    name: str
    url: str
    page: Page
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
