"""What readers take away: an EPUB that holds together, and the book as text."""

from __future__ import annotations

import posixpath
import re
import shutil
import zipfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

import downloads

from .sites import SAMPLE, Sites


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
    for name, picture in documents.items():
        if name.endswith(".svg"):
            assert b"var(--" not in ElementTree.tostring(picture), name


def test_the_book_is_there_as_text(taken: Path) -> None:
    assert "return total / sum(weights)" in (taken / "book.txt").read_text(encoding="utf-8")
    overview = (taken / "llms.txt").read_text(encoding="utf-8")
    assert (
        "- [Everything · Sample](https://example.org/site/chapters/01-everything.html): "
        in overview
    )
    assert zipfile.is_zipfile(taken / "exercises.zip")
