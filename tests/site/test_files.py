"""What the site's files promise without a browser: links that lead somewhere, nothing fetched."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlparse

import pytest

from .conftest import BUILDS, Sites

FETCHED = {"script", "img", "source", "iframe", "video", "audio", "embed", "object"}
LOADED_LINKS = {"stylesheet", "icon", "preload", "modulepreload", "prefetch", "preconnect"}


class PageParser(HTMLParser):
    """Collects a page's names, its links and the addresses that a browser loads by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.links: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        if "id" in values:
            self.names.append(values["id"])
        address = values.get("href") or values.get("src") or values.get("data")
        if not address:
            return
        self.links.append(address)
        if tag in FETCHED or (tag == "link" and LOADED_LINKS & set(values.get("rel", "").split())):
            self.loaded.append(address)


def parse(site: Path) -> dict[Path, PageParser]:
    pages = {}
    for path in sorted(site.rglob("*.html")):
        pages[path] = PageParser()
        pages[path].feed(path.read_text(encoding="utf-8"))
    return pages


@pytest.fixture(scope="session", params=BUILDS)
def site(request: pytest.FixtureRequest, sites: Sites) -> Path:
    return sites[request.param]


@pytest.fixture(scope="session")
def pages(site: Path) -> dict[Path, PageParser]:
    return parse(site)


def broken_links(path: Path, pages: dict[Path, PageParser], site: Path) -> list[str]:
    broken = []
    for link in pages[path].links:
        if urlparse(link).scheme or link.startswith("//"):
            continue
        address, name = urldefrag(link)
        target = (path.parent / unquote(address.split("?")[0])).resolve() if address else path
        target = target / "index.html" if target.is_dir() else target
        if not target.is_relative_to(site) or not target.is_file():
            broken.append(f"{link}: no such file")
        elif name and target in pages and unquote(name) not in pages[target].names:
            broken.append(f"{link}: no such place in {target.relative_to(site)}")
    return broken


def test_every_link_leads_somewhere(pages: dict[Path, PageParser], site: Path) -> None:
    problems = {str(path.relative_to(site)): broken_links(path, pages, site) for path in pages}
    assert {page: broken for page, broken in problems.items() if broken} == {}


def test_no_name_is_used_twice_on_a_page(pages: dict[Path, PageParser], site: Path) -> None:
    twice = {
        str(path.relative_to(site)): sorted(
            {name for name in page.names if page.names.count(name) > 1}
        )
        for path, page in pages.items()
    }
    assert {page: names for page, names in twice.items() if names} == {}


def test_nothing_is_loaded_from_another_host(pages: dict[Path, PageParser], site: Path) -> None:
    foreign = [f"{path.relative_to(site)}: {address}" for path, page in pages.items()
               for address in page.loaded if re.match(r"(\w+:)?//", address)]  # fmt: skip
    assert foreign == []


def test_no_stylesheet_imports_from_another_host(site: Path) -> None:
    foreign = re.compile(r"(?:url\(|@import)\s*[\"']?(https?:)?//")
    styles = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.css")}
    assert styles
    assert [path.name for path, text in styles.items() if foreign.search(text)] == []


def test_no_markup_is_left_over(pages: dict[Path, PageParser]) -> None:
    """Fences, shortcodes and cross-references that nobody handled."""
    for path in pages:
        text = re.sub(
            r"<(pre|code|script)\b.*?</\1>", "", path.read_text(encoding="utf-8"), flags=re.S
        )
        assert not re.search(r"^:::|\{\{<|<x-ref|\?(fig|sec|eq|tbl)-", text, re.M), path


@pytest.mark.parametrize(
    "part",
    [
        "code-annotation-anchor",
        'role="tab"',
        "data-tip=",
        "<math",
        "callout-note",
        "takeaways",
        "doc-biblioref",
    ],
)
def test_the_sample_holds_what_the_browser_tests_look_at(sites: Sites, part: str) -> None:
    text = (sites["sample-plain"] / "chapters/01-everything.html").read_text(encoding="utf-8")
    assert part in text
