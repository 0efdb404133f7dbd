"""What readers take away: an EPUB that holds together, and the book as text."""

from __future__ import annotations

import os
import posixpath
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

import downloads

from .sites import BUILDS, ROOT, SAMPLE, Sites


@pytest.fixture(scope="session")
def taken(sites: Sites, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("downloads") / "site"
    shutil.copytree(sites["sample-plain"], folder)
    downloads.main(SAMPLE, folder)
    return folder


@pytest.fixture(scope="session")
def documents(taken: Path) -> dict[str, ElementTree.Element]:
    """The EPUB's pages and pictures: each is XML, or reading it fails here."""
    with zipfile.ZipFile(taken / "book.epub") as book:
        return {
            name: ElementTree.fromstring(book.read(name))
            for name in book.namelist()
            if name.endswith((".xhtml", ".svg", ".opf", ".ncx"))
        }


def test_every_link_of_the_epub_leads_somewhere(
    taken: Path, documents: dict[str, ElementTree.Element]
) -> None:
    pages = {name: page for name, page in documents.items() if name.endswith(".xhtml")}
    names = {
        file: [each.get("id") for each in page.iter() if each.get("id")]
        for file, page in pages.items()
    }
    contained = zipfile.ZipFile(taken / "book.epub").namelist()
    dead = []
    for file, page in pages.items():
        assert len(names[file]) == len(set(names[file])), file
        for element in page.iter():
            link = element.get("href") or element.get("src")
            if not link or re.match(r"\w+:", link):
                continue
            path, _, place = link.partition("#")
            target = posixpath.normpath(posixpath.join(posixpath.dirname(file), path))
            target = target if path else file
            places = ["", *names.get(target, [])] if target in contained else []
            if place not in places:
                dead.append(link)
    assert dead == []


def test_the_epub_holds_pictures_formulas_and_notes(
    taken: Path,
    documents: dict[str, ElementTree.Element],
) -> None:
    text = {name: "".join(page.itertext()) for name, page in documents.items()}
    everything = "".join(text.values())
    order = ["Start", "def average(", "Each value counts as often", "Divided once."]
    assert sorted(order, key=everything.index) == order
    assert "Added:" not in everything
    tags = [
        element.tag.rpartition("}")[2] for page in documents.values() for element in page.iter()
    ]
    assert tags.count("math") >= 2
    assert sum(name.endswith(".svg") for name in documents) >= 7
    assert any(name.endswith(".png") for name in zipfile.ZipFile(taken / "book.epub").namelist())
    for name, picture in documents.items():
        if name.endswith(".svg"):
            drawn = ElementTree.tostring(picture, encoding="unicode")
            assert "var(--" not in drawn, name
            assert (" class=" in drawn) <= ("style>" in drawn), f"{name} lost its colours"


def test_the_book_is_there_as_text(taken: Path) -> None:
    assert "return total / sum(weights)" in (taken / "book.txt").read_text(encoding="utf-8")
    overview = (taken / "llms.txt").read_text(encoding="utf-8")
    assert (
        "- [Everything · Sample](https://example.org/site/chapters/01-everything.html): "
        in overview
    )


@pytest.mark.parametrize("name", [name for name in BUILDS if name.startswith("sample")])
def test_every_page_links_what_is_there(sites: Sites, name: str, tmp_path: Path) -> None:
    site = tmp_path / "site"
    shutil.copytree(sites[name], site)
    for _ in range(2):  # a second time adds nothing
        downloads.main(sites.folder / f"{name}-source", site)
    pages = [path for path in site.rglob("*.html") if path.name != "404.html"]
    assert len(pages) >= 5
    for page in pages:
        links = re.findall(r'href="([^"]*)" download>', page.read_text(encoding="utf-8"))
        taken = [page.parent / link for link in links if link.endswith((".epub", ".txt", ".zip"))]
        assert len(taken) == 3, page
        assert [path for path in taken if not path.is_file()] == []


def test_the_exercises_run_where_they_are_unpacked(tmp_path: Path) -> None:
    downloads.pack_exercises(ROOT, tmp_path / "exercises.zip")
    shutil.unpack_archive(tmp_path / "exercises.zip", tmp_path)
    done = subprocess.run(
        [sys.executable, "exercises/walk.py", "01"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "src")},
        capture_output=True,
        encoding="utf-8",
        timeout=170,
    )
    assert done.returncode == 1, done.stderr  # a step does not hold yet
    assert "01_averaging" in done.stdout
    listed = subprocess.run(
        ["make", "-n", "exercise", "N=01"], cwd=tmp_path, capture_output=True, encoding="utf-8"
    )
    assert "tools/set_up.py exercise" in listed.stdout
