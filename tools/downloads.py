#!/usr/bin/env python3
"""Put what readers take away into _site, as the plain build made it: python tools/downloads.py

`book.epub` and, where `typst` is installed, `book.pdf`: all pages in their order, pictures as they
stand, notes below their code, answers unfolded. `book.txt` and `llms.txt` for those who read text
alone; `exercises.zip`.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

import pypandoc

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools" / "plain"))
import build  # noqa: E402

DROPPED = re.compile(r"<(script|style|nav|noscript)\b.*?</\1>|<link\b[^>]*>", re.DOTALL)
HEARD = re.compile(r'<span class="visually-hidden">(Added|Removed|Unchanged): </span>')
UNPRINTED = re.compile(r'\s(?:data-[\w-]+|tabindex|role|aria-[\w-]+)="[^"]*"')
PICTURE = re.compile(r"(<svg\b.*?</svg>)", re.DOTALL)
EMPTY = re.compile(r'\s[\w-]+=""')
FIGURE = re.compile(r'<figure id="([^"]+)"')  # Pandoc forgets the names of some
NOTE = re.compile(r"<dt><a [^>]*>(.*?)</a></dt>")  # lines of code have no names on paper
TOKEN = re.compile(r"--([\w-]+): light-dark\((\S+), ")
SCHEME = re.compile(r"\w+:|//")
STYLE = ".notes { margin-left: 1em; } pre { white-space: pre-wrap; font-size: 0.75em; }"


def main(source: Path, site: Path) -> None:
    config = build.read_config(source)
    pages = build.list_pages(config, source)
    if not (site / "plain").is_dir():
        raise build.BuildError("there is no plain build in _site: make site WITH=plain")
    index = json.loads((site / "search.json").read_text(encoding="utf-8"))
    build.write(site / "book.txt", "\n".join(map(plain_section, index)))
    build.write(site / "llms.txt", overview(config["book"], pages, site))
    with zipfile.ZipFile(site / "exercises.zip", "w", zipfile.ZIP_DEFLATED) as packed:
        for path in sorted((source / "exercises").glob("*.*")):
            packed.write(path, path.relative_to(source))
    printed = [page for page in pages if page.part in (None, page.source) or "." not in page.part]
    known = {page.url for page in printed}
    home = config["book"]["site-url"]
    typeset(config["book"], "\n".join(on_paper(page, known, home, site) for page in printed), site)


def plain_section(section: dict[str, str]) -> str:
    place = ": ".join(filter(None, (section["title"], section["section"])))
    return f"{place}\n\n{section['text']}\n"


def overview(book: dict[str, Any], pages: list[build.Page], site: Path) -> str:
    """The book's pages with what each is about, as llmstxt.org has it."""
    lines = [f"# {book['title']}\n", f"All of it as text: {book['site-url']}/book.txt\n"]
    for page in pages:
        text = (site / page.url).read_text(encoding="utf-8")
        title = re.findall("<title>(.*?)</title>", text)[0]
        about = re.findall('<meta name="description" content="([^"]*)"', text)[0]
        lines.append(f"- [{title}]({book['site-url']}/{page.url}): {about}")
    return "\n".join(lines) + "\n"


def on_paper(page: build.Page, known: set[str], home: str, site: Path) -> str:
    """The page's HTML, with names that no other page has and links that lead to them.

    `known` are the pages on paper. What is not, such as the page of a run, is a link to the site.
    """
    text = (site / page.url).read_text(encoding="utf-8")
    text = text[text.index("<main") : text.index("</main>")].partition(">")[2]
    text = HEARD.sub("", DROPPED.sub("", text))
    own = name_of(page.url)

    def link(match: re.Match[str]) -> str:
        address, _, place = match[1].partition("#")
        if SCHEME.match(address):
            return match[0]
        target = PurePosixPath(page.url).parent / address if address else page.url
        url = build.posixpath.normpath(target)
        if url in known:
            return f'href="#{name_of(url)}{place and "--"}{place}"'
        return f'href="{home}/{url}{place and "#"}{place}"'

    parts = PICTURE.split(text)
    for number in range(0, len(parts), 2):  # every other one is a picture
        part = NOTE.sub(r"<dt>\1</dt>", UNPRINTED.sub("", parts[number]))
        part = re.sub(r'href="([^"]*)"', link, part)
        parts[number] = re.sub(r'\sid="([^"]+)"', rf' id="{own}--\1"', part)
        parts[number] = FIGURE.sub(r'<div id="\1"></div><figure', parts[number])
    parts[1::2] = map(in_light_colours, parts[1::2])
    return re.sub(r"<h1[^>]*>", f'<h1 id="{own}">', "".join(parts), count=1)


def name_of(url: str) -> str:
    return PurePosixPath(url).with_suffix("").as_posix().replace("/", "-")


def in_light_colours(picture: str) -> str:
    """A picture that stands by itself, without the page's style."""
    colours = dict(TOKEN.findall((ROOT / "theme/book.css").read_text(encoding="utf-8")))

    def colour(match: re.Match[str]) -> str:
        return colours.get(match[1], match[2] or "currentColor")

    picture = EMPTY.sub("", re.sub(r"var\(--([\w-]+)(?:,\s*([^()]+))?\)", colour, picture))
    if "xmlns=" in picture:
        return picture
    return picture.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)


def typeset(book: dict[str, Any], text: str, site: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="paper-") as name:
        folder = Path(name)
        build.write(folder / "book.html", text)
        build.write(folder / "book.css", STYLE)
        shared = [
            pypandoc.get_pandoc_path(),
            "book.html",
            "--from=html",
            "--toc",
            "--toc-depth=2",
            f"--metadata=title:{book['title']}",
            "--metadata=lang:en",
        ]
        epub = ["--to=epub3", "--css=book.css", "--split-level=1", "--mathml"]
        epub += ["-o", str(site / "book.epub")]
        subprocess.run([*shared, *epub], cwd=folder, check=True)
        if not importlib.util.find_spec("typst"):
            print("downloads: no book.pdf: typst is not installed")
            return
        import typst

        paper = ["--to=typst", "--standalone", "--extract-media=media", "-o", "book.typ"]
        subprocess.run([*shared, *paper], cwd=folder, check=True)
        typst.compile(folder / "book.typ", output=site / "book.pdf")


if __name__ == "__main__":
    try:
        main(ROOT, ROOT / "_site")
    except (build.BuildError, OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"downloads: error: {error}")
