"""The plain build on small books: what a page becomes, and what stops the build."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from plain import build

CONFIG = """
book:
  title: Small & good
  chapters:
    - index.qmd
    - part: Work
      chapters:
        - chapters/one.qmd
        - chapters/two.qmd
    - part: Appendices
      chapters:
        - chapters/words.qmd
"""
PAGES = {
    "index.qmd": "# Hello {-}\n\nSee @fig-a, @sec-two and [two](chapters/two.qmd#deep).\n",
    "chapters/one.qmd": "# One\n\n![A picture](../vis/a.svg){#fig-a}\n",
    "chapters/two.qmd": "# Two {#sec-two}\n\n## Deep\n\nText.\n",
    "chapters/words.qmd": "# Words {#sec-words}\n\nText.\n",
    "vis/a.svg": "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 1 1'/>",
}


class Book:
    def __init__(self, folder: Path) -> None:
        self.source = folder / "source"
        self.site = folder / "site"
        for name, text in {"_quarto.yml": CONFIG, **PAGES}.items():
            self.write(name, text)

    def write(self, name: str, text: str) -> None:
        path = self.source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def page(self, text: str) -> str:
        """The HTML of chapter one's text, with this markdown below its title."""
        self.write("chapters/one.qmd", f"# One\n\n![A picture](../vis/a.svg){{#fig-a}}\n\n{text}")
        self.build()
        return self.read("chapters/one.html")

    def build(self) -> None:
        build.build(self.source, self.site)

    def read(self, name: str) -> str:
        """A page of the site, every stretch of white space as one space."""
        html = (self.site / name).read_text(encoding="utf-8")
        return re.sub(r"\s+", " ", html)


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book(tmp_path)


def failure(book: Book) -> str:
    with pytest.raises(build.BuildError) as caught:
        book.build()
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_pages_stand_in_parts(book: Book) -> None:
    pages = build.list_pages(build.read_config(book.source), book.source)
    assert [page.part for page in pages] == [None, "Work", "Work", "Appendices"]


def test_references_lead_to_other_pages(book: Book) -> None:
    book.build()
    index = book.read("index.html")
    assert '<a href="chapters/one.html#fig-a" class="xref">Figure 1</a>' in index
    assert '<a href="chapters/two.html#sec-two" class="xref">Two</a>' in index
    assert '<a href="chapters/two.html#deep">two</a>' in index


@pytest.mark.parametrize(
    ("markdown", "shown"),
    [
        ("@sec-words", ">Words</a>"),
        ("## Part {#sec-part}\n\n@sec-part", ">Part</a>"),
        ("$$\nx\n$$ {#eq-x}\n\n@eq-x", ">Equation 1</a>"),
        ("| a |\n|---|\n| 1 |\n\n: Sizes {#tbl-s}\n\n@tbl-s", ">Table 1</a>"),
    ],
)
def test_references_are_written_as_in_quarto(book: Book, markdown: str, shown: str) -> None:
    assert shown in book.page(markdown)


def test_navigation_says_where_you_are(book: Book) -> None:
    book.build()
    two = book.read("chapters/two.html")
    assert '<p class="nav-part">Work</p>' in two
    assert '<a href="two.html" aria-current="page">Two</a>' in two
    assert 'class="prev" rel="prev" href="one.html"' in two
    assert 'class="next" rel="next" href="words.html"' in two
    assert "<title>Two · Small &amp; good</title>" in two
    assert 'class="prev"' not in book.read("index.html")


def test_pages_below_a_page_are_one_entry_of_the_navigation(book: Book) -> None:
    part = "    - part: runs.qmd\n      chapters: [runs/one.qmd, runs/two.qmd]\n"
    book.write("_quarto.yml", CONFIG + part)
    for name in ("runs", "runs/one", "runs/two"):
        book.write(f"{name}.qmd", f"# Run {name}\n")
    book.build()
    assert re.findall("Run runs[/a-z]*", book.read("index.html")) == ["Run runs"]
    shown = re.findall("<li>.*?(Run [/a-z]*)", book.read("runs/one.html"))
    assert shown == ["Run runs", "Run runs/one", "Run runs/two"]


def test_a_page_for_addresses_that_lead_nowhere_works_at_any(book: Book) -> None:
    book.write("_quarto.yml", CONFIG + "  site-url: https://example.org/a/book\n")
    book.write("404.qmd", "# Lost\n\n[Hello](index.qmd)\n")
    book.build()
    lost = book.read("404.html")
    assert lost.index('<base href="/a/book/">') < lost.index("<link")
    assert '<a href="index.html">Hello</a>' in lost
    assert "canonical" not in lost
    assert "Lost" not in book.read("index.html") + book.read("search.json")
    locations = re.findall("<loc>(.*?)</loc>", book.read("sitemap.xml"))
    assert locations[1] == "https://example.org/a/book/chapters/one.html"
    assert len(locations) == 4


def test_the_search_reads_sections_as_they_are_shown(book: Book) -> None:
    book.page(
        "Before.\n\n## Deep *down* {#d}\n\n$x$ and `a < b`\n\n<svg><text>unread</text></svg>\n"
    )
    sections = [each for each in json.loads(book.read("search.json")) if "one" in each["href"]]
    assert sections == [
        {
            "href": "chapters/one.html",
            "title": "One",
            "section": "",
            "text": "Figure 1: A picture Before.",
        },
        {
            "href": "chapters/one.html#d",
            "title": "One",
            "section": "Deep down",
            "text": "x and a < b",
        },
    ]


def test_what_a_page_refers_to_is_copied(book: Book) -> None:
    book.write("_quarto.yml", "project: {resources: [/data/*.txt]}\n" + CONFIG)
    book.write("data/a.txt", "a")
    book.write("data/b.bin", "b")
    book.build()
    assert (book.site / "vis/a.svg").is_file()
    assert (book.site / "data/a.txt").read_text() == "a"
    assert not (book.site / "data/b.bin").exists()


def test_an_earlier_build_leaves_nothing_behind(book: Book) -> None:
    book.write("../site/old.html", "old")
    book.build()
    assert not (book.site / "old.html").exists()
    assert (book.site / "index.html").is_file()


def test_a_failed_build_keeps_the_last_one(book: Book) -> None:
    book.build()
    book.write("index.qmd", "# Hello\n\n@fig-none\n")
    failure(book)
    assert (book.site / "index.html").is_file()


def test_tabs(book: Book) -> None:
    html = book.page("::: panel-tabset\n## GPU\n\nfast\n\n## CPU\n\n@fig-a\n:::")
    assert re.findall(r'role="tab" id="(\S+)-tab" aria-controls="(\S+)"> (\w+) <', html) == [
        ("tabset-1-1", "tabset-1-1", "GPU"),
        ("tabset-1-2", "tabset-1-2", "CPU"),
    ]
    assert re.search(r'role="tabpanel" id="tabset-1-2" .*?> <p><a href="#fig-a"', html)
    assert "toc-gpu" not in html


def test_includes_and_root_addresses(book: Book) -> None:
    after = "{text: '<script src=\"/s.js\"></script>'}"
    options = f"format: {{html: {{css: s.css, include-after-body: {after}}}}}\n"
    book.write("_quarto.yml", options + CONFIG)
    book.write("s.css", "p {}")
    book.write("s.js", "1")
    html = book.page("[home](/index.qmd)")
    assert '<link rel="stylesheet" href="../s.css">' in html
    assert '<script src="../s.js">' in html
    assert '<a href="../index.html">home</a>' in html
    assert (book.site / "s.js").is_file()


KNUTH = "@book{knuth, author={Knuth, Donald}, title={Art}, year={1968}}\n"


@pytest.fixture
def citing(book: Book) -> Book:
    book.write("_quarto.yml", "bibliography: refs.bib\nlink-citations: true\n" + CONFIG)
    book.write("refs.bib", KNUTH)
    return book


def test_citations(citing: Book) -> None:
    html = citing.page("As @knuth says [@knuth, section 5], @fig-a.")
    link = '<a href="#ref-knuth" role="doc-biblioref">'
    assert f"Knuth ({link}1968</a>)" in html
    assert f"({link}Knuth 1968, sec. 5</a>)" in html
    assert 'id="ref-knuth"' in html
    assert '<a href="#fig-a" class="xref">Figure 1</a>' in html


def test_the_style_of_citations_is_the_book_s(citing: Book) -> None:
    style = (build.HERE.parents[1] / "theme/citations.csl").read_text(encoding="utf-8")
    citing.write("own.csl", style)
    citing.write("_quarto.yml", "csl: own.csl\nbibliography: refs.bib\n" + CONFIG)
    citing.write("refs.bib", KNUTH + "@online{api, author={Maker}, title={Pumps: A list}}\n")
    html = citing.page("First [@knuth, section 5], then [@api].")
    assert "(Knuth 1968, section 5)" in html
    assert re.search(r"\(Maker, (<span>)?“Pumps”", html)
    assert "Donald Knuth (1968). <em>Art</em>." in html


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "index.qmd",
            "# A\n\n@fig-none\n",
            "index.qmd: @fig-none: no page has a figure of that name",
        ),
        ("index.qmd", "Text.\n", "index.qmd: no title: start the page with '# Title'"),
        (
            "index.qmd",
            "# A\n\n[x](gone.qmd)\n",
            "index.qmd: it links to gone.html: there is no such file",
        ),
        (
            "index.qmd",
            "# A\n\n![x](a.png)\n",
            "index.qmd: it links to a.png: there is no such file",
        ),
        (
            "index.qmd",
            "# A {#sec-two}\n",
            "chapters/two.qmd: #sec-two is already used in index.qmd",
        ),
        (
            "index.qmd",
            "# A\n\n{{< video x >}}\n",
            "index.qmd: shortcode {{<: the plain build knows none",
        ),
        (
            "index.qmd",
            "# A\n\n::: {.callout-tip}\nx\n:::\n",
            "index.qmd: .callout-tip: the plain build knows no callouts, use a box of the book",
        ),
        *(
            (
                "index.qmd",
                f"# A\n\n[{text}]\n",
                "index.qmd: write @fig-a by itself: nothing stands with a cross-reference",
            )
            for text in ("-@fig-a", "see @fig-a", "@fig-a; @sec-words", "@fig-a; @knuth")
        ),
        ("_quarto.yml", "book: [", "_quarto.yml is not valid YAML"),
        ("_quarto.yml", "project: {}", "_quarto.yml: expected a mapping with a 'book' in it"),
        ("_quarto.yml", "book: {title: x}", "_quarto.yml: book has no chapters"),
        (
            "_quarto.yml",
            "book: {chapters: [no.qmd]}",
            "_quarto.yml names no.qmd: there is no such file",
        ),
        ("_quarto.yml", "filters: [f.lua]\n" + CONFIG, "_quarto.yml names the filter f.lua"),
        (
            "_quarto.yml",
            "format: {html: {include-in-header: h.html}}\n" + CONFIG,
            "_quarto.yml includes h.html: there is no such file",
        ),
    ],
)
def test_what_stops_the_build(book: Book, name: str, text: str, message: str) -> None:
    book.write(name, text)
    assert failure(book).startswith(message)


def test_a_filters_own_error_is_told_in_one_line(book: Book) -> None:
    book.write("_quarto.yml", "filters: [f.lua]\n" + CONFIG)
    book.write("f.lua", "function Pandoc() error('the wheel came off') end\n")
    message = failure(book)
    assert re.fullmatch(r"(index|chapters/one)\.qmd: the wheel came off", message)


def test_the_command_says_what_is_wrong_without_a_traceback(book: Book) -> None:
    book.write("index.qmd", "# A\n\n@fig-none\n")
    command = [sys.executable, build.__file__, book.source, book.site]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "error: index.qmd: @fig-none: no page has a figure of that name\n"
