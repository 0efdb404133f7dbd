"""The code on the book's pages: quotes as a reader copies them, and fenced blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

from plain import build

ROOT = Path(__file__).resolve().parents[3]
CONFIG = build.read_config(ROOT)
PAGES = {page.source: page for page in build.list_pages(CONFIG, ROOT)}
FENCED = [*PAGES, "README.md", "CONTRIBUTING.md"]
FENCE = re.compile(
    r"^(?P<indent> *)(?P<ticks>`{3,}) *(?P<info>[^`\n]*)\n(?P<text>.*?)^ *(?P=ticks)`* *$",
    re.MULTILINE | re.DOTALL,
)
QUOTE = re.compile(r"^:{3,} *\{\.(?:code|diff) ", re.MULTILINE)


@dataclass(frozen=True)
class Quote:
    source: str  # the file that it is from
    language: str
    text: str  # what the copy button copies


@dataclass(frozen=True)
class Fence:
    place: str  # "chapters/02-ranks.qmd:19"
    language: str
    mark: str | None  # the value of `needs` or `broken`
    text: str


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@cache
def fences(language: str) -> list[Fence]:
    """The fenced blocks of the pages, README and CONTRIBUTING, in reading order."""
    found = []
    for page in FENCED:
        source = read(page)
        for match in FENCE.finditer(source):
            name = re.match(r"(?:\{ *\.)?(\w*)", match["info"])
            mark = re.search(r'(?:needs|broken)="([^"]+)"', match["info"])
            indent = "^" + match["indent"]
            place = f"{page}:{source.count(chr(10), 0, match.start()) + 1}"
            text = re.sub(indent, "", match["text"], flags=re.MULTILINE)
            if name and name[1] == language:
                found.append(Fence(place, language, mark and mark[1], text))
    return found


def quotes(page: str) -> list[Quote]:
    """What the copy buttons of the page's quotes copy, in the plain build."""
    parser = QuoteParser()
    parser.feed(build.render_page(PAGES[page], CONFIG, ROOT).text)
    return parser.quotes


class QuoteParser(HTMLParser):
    """Collects the `.code` and `.diff` divs of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.quotes: list[Quote] = []
        self.needs: str | None = None  # of the quote that is open
        self.source = self.language = self.text = ""
        self.is_diff = False  # whose button copies the whole new file, and not what it shows
        self.place = ""  # where text goes: "source", "text", or nowhere

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        classes = (given.get("class") or "").split()
        if tag == "div" and "code" in classes:
            self.needs, self.source, self.text = given.get("data-before") or "", "", ""
            self.is_diff = "diff" in classes
        elif self.needs is None:
            return
        elif "code-file" in classes:
            self.place = "source"
        elif tag == "pre":
            self.language = classes[-1]
        elif tag in ("code", "button"):
            self.place = "text" if tag == "code" and self.language else ""

    def handle_endtag(self, tag: str) -> None:
        if self.needs is None:
            return
        if tag == "button" and self.language:
            self.place = "text"
        elif tag == "div":
            self.place = ""
        elif tag == "pre":
            text = self.needs + ("" if self.is_diff else self.text)
            self.quotes.append(Quote(self.source.strip(), self.language, text))
            self.needs, self.place, self.language = None, "", ""

    def handle_data(self, data: str) -> None:
        if self.place:
            setattr(self, self.place, getattr(self, self.place) + data)
