#!/usr/bin/env python3
"""Put what readers take away into _site, and link it from every page: python tools/downloads.py

`book.epub` and, where `typst` is installed, `book.pdf`: all pages in their order, as the plain
build makes them, pictures as they stand, notes below their code, answers unfolded. `book.txt` and
`llms.txt` for those who read text alone; `exercises.zip`, with the package that they need.
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
NAMED = r'<(?:div class="(?:box-title|rank-name|ranks-title)"|summary)>'
TITLE = re.compile(rf"{NAMED}(.*?)</(?:div|summary)>", re.DOTALL)
PAPER = {"papersize": "a4", "fontsize": "10pt", "margin": {"x": "2.2cm", "y": "2.4cm"}}
EXERCISES = ("exercises/**/*.*", "src/**/*.*", "stages/*.*", "tools/set_up.py",
             "tools/arguments.py", "Makefile", "pyproject.toml", "constraints.txt",
             "README.md", "LICENSE")  # fmt: skip
LINKED = {"book.epub": "EPUB", "book.pdf": "PDF", "book.txt": "text", "exercises.zip": "exercises"}
LINKS = re.compile(r'<p class="downloads">.*?</p>')


def main(source: Path, site: Path) -> None:
    if not (site / "index.html").is_file():
        raise build.BuildError("there is no _site yet: make site")
    with tempfile.TemporaryDirectory(prefix="plain-") as folder:
        plain = site if (site / "plain").is_dir() else Path(folder)
        if plain != site:  # Quarto made it
            build.build(source, plain)
        take_along(source, plain, site)
    link_from_pages(site)


def take_along(source: Path, plain: Path, site: Path) -> None:
    """Write the downloads into `site`, as the plain build has the pages."""
    config = build.read_config(source)
    pages = build.list_pages(config, source)
    index = json.loads((plain / "search.json").read_text(encoding="utf-8"))
    build.write(site / "book.txt", "\n".join(map(plain_section, index)))
    build.write(site / "llms.txt", overview(config["book"], pages, plain))
    pack_exercises(source, site / "exercises.zip")
    printed = [page for page in pages if page.part in (None, page.source) or "." not in page.part]
    known = {page.url for page in printed}
    home = config["book"]["site-url"]
    text = "\n".join(on_paper(page, known, home, plain) for page in printed)
    typeset(config["book"], text, site)


def pack_exercises(source: Path, file: Path) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        for path in sorted(path for pattern in EXERCISES for path in source.glob(pattern)):
            if "__pycache__" not in path.parts and ".egg-info" not in str(path):
                packed.write(path, path.relative_to(source))


def link_from_pages(site: Path) -> None:
    there = [name for name in LINKED if (site / name).is_file()]
    for page in site.rglob("*.html"):
        up = "../" * (len(page.relative_to(site).parts) - 1)
        links = " · ".join(f'<a href="{up}{name}" download>{LINKED[name]}</a>' for name in there)
        before, _, after = LINKS.sub("", page.read_text(encoding="utf-8")).rpartition("</footer>")
        row = f'<p class="downloads">To take along: {links}</p>'
        if before and page.name != build.NOT_FOUND.replace(".qmd", ".html"):
            page.write_text(f"{before}{row}</footer>{after}", encoding="utf-8")


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

    def image(match: re.Match[str]) -> str:
        return f'<img{match[1]} src="{site.resolve() / PurePosixPath(page.url).parent / match[2]}"'

    parts = PICTURE.split(text)
    for number in range(0, len(parts), 2):  # every other one is a picture
        part = HEARD.sub("", DROPPED.sub("", parts[number]))
        part = NOTE.sub(r"<dt>\1</dt>", UNPRINTED.sub("", part))
        part = TITLE.sub(r"<p><strong>\1</strong></p>", part)
        part = part.replace('<span class="code-said">', "<span>, ")
        part = re.sub(r'href="([^"]*)"', link, part)
        part = re.sub(r'<img([^>]*) src="([^"]*)"', image, part)
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
        metadata = {"title": book["title"], "lang": "en", **PAPER}
        build.write(folder / "book.json", json.dumps(metadata))
        shared = [pypandoc.get_pandoc_path(), "book.html", "--from=html", "--toc", "--toc-depth=2"]
        shared.append("--metadata-file=book.json")
        epub = ["--to=epub3", f"--css={ROOT / 'theme/print.css'}", "--split-level=1", "--mathml"]
        epub += ["-o", str(site / "book.epub")]
        subprocess.run([*shared, *epub], cwd=folder, check=True)
        if not importlib.util.find_spec("typst"):
            print("downloads: no book.pdf: typst is not installed")
            return
        import typst

        paper = ["--to=typst", "--standalone", f"--include-in-header={ROOT / 'theme/print.typ'}"]
        paper += ["--extract-media=media", "-o", "book.typ"]
        subprocess.run([*shared, *paper], cwd=folder, check=True)
        typst.compile(folder / "book.typ", output=site / "book.pdf")


if __name__ == "__main__":
    try:
        main(ROOT, ROOT / "_site")
    except (build.BuildError, OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"downloads: error: {error}")
