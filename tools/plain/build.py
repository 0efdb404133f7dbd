"""The plain build: the book as a site, made with Pandoc where Quarto is not at hand.

    python tools/plain/build.py SOURCE OUTPUT

Every page goes through Pandoc once, with the book's own filters and plain.lua; what depends on
other pages (navigation, cross-references) is put in afterwards. What is read from _quarto.yml:
the book's title, description, favicon, repo-url, site-url, the image of open-graph, page-footer and
chapters; resources, filters, bibliography, csl, link-citations; of format.html: css, toc-depth,
include-in-header and include-after-body. Figures count from 1 on every page.
"""

from __future__ import annotations

import html
import itertools
import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import pypandoc
import yaml

HERE = Path(__file__).resolve().parent
BROWSER = HERE.parents[1] / "theme/plain"
KINDS = {"fig": "figure", "tbl": "table", "eq": "equation", "sec": "section"}
REFERENCE = re.compile(r'<x-ref to="([^"]+)"></x-ref>')
LOCAL_LINK = re.compile(r'\s(?:href|src)="(?!\w+:|//)([^"#?]+)[^"]*"')
HEADING = re.compile(r"<h[1-4]([^>]*)>(.*?)</h[1-4]>", re.DOTALL)
UNREAD = re.compile(r"<(script|style|svg|annotation|nav|noscript)\b.*?</\1>", re.DOTALL)
SITEMAP = '<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">{}</urlset>\n'
FEED = "theme/feed.lua"
NOT_FOUND = "404.qmd"  # no page of the book: a server shows it at any address


class BuildError(Exception):
    """What stopped the build, in one line."""


@dataclass(frozen=True)
class Page:
    source: str  # relative to the book's folder: "chapters/05-ring.qmd"
    part: str | None
    label: str | None = None  # what the navigation calls it; None: its title

    @property
    def url(self) -> str:
        return str(PurePosixPath(self.source).with_suffix(".html"))

    @property
    def root(self) -> str:
        return "../" * (len(PurePosixPath(self.source).parts) - 1)


@dataclass(frozen=True)
class Rendered:
    page: Page
    title: str  # HTML
    targets: dict[str, str]  # "fig-ring" → "Figure 1"
    text: str  # the page's HTML, navigation and cross-references still to come

    @property
    def label(self) -> str:
        return html.escape(self.page.label) if self.page.label else self.title


def build(source: Path, output: Path) -> None:
    """Build the book of the folder `source` into `output`, which is replaced."""
    config = read_config(source)
    write_site(render_pages(all_pages(config, source), config, source), source, output)


def write_site(rendered: list[Rendered], source: Path, output: Path) -> None:
    targets = all_targets(rendered)
    book = [entry for entry in rendered if entry.page.source != NOT_FOUND]
    address = read_config(source)["book"].get("site-url", "")
    with tempfile.TemporaryDirectory(prefix="book-") as folder:
        site = Path(folder) / "site"
        index = []
        for entry in rendered:
            text = resolve_references(entry, targets)
            text = text.replace("<!--nav-->", navigation(book, entry.page))
            text = text.replace("<!--pager-->", pager(book, entry))
            write(site / entry.page.url, text)
            index += sections(entry, text) if entry in book else []
        write(site / "search.json", json.dumps(index, ensure_ascii=False))
        locations = [f"<url><loc>{address}/{entry.page.url}</loc></url>" for entry in book]
        write(site / "sitemap.xml", SITEMAP.format("".join(locations)))
        write_feed(source, site)
        copy_assets(read_config(source), source, site)
        for entry in book:
            copy_linked_files(entry, source, site)
        replace_folder(site, output)


# The book's configuration ------------------------------------------------------------------------


def read_config(source: Path) -> dict[str, Any]:
    path = source / "_quarto.yml"
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BuildError(f"_quarto.yml cannot be read: {error.strerror} ({path})") from error
    except yaml.YAMLError as error:
        raise BuildError(
            f"_quarto.yml is not valid YAML: {' '.join(str(error).split())}"
        ) from error
    if not isinstance(config, dict) or not isinstance(config.get("book"), dict):
        raise BuildError("_quarto.yml: expected a mapping with a 'book' in it")
    return config


def html_options(config: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = config.get("format", {}).get("html", {})
    return options


def as_list(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]


def list_pages(config: dict[str, Any], source: Path) -> list[Page]:
    """The pages in reading order."""
    pages = [*entries(as_list(config["book"].get("chapters")), None, source)]
    if not pages:
        raise BuildError("_quarto.yml: book has no chapters")
    return pages


def all_pages(config: dict[str, Any], source: Path) -> list[Page]:
    """The pages in reading order, and the one for addresses that lead nowhere."""
    missing = [Page(NOT_FOUND, None)] if (source / NOT_FOUND).is_file() else []
    return list_pages(config, source) + missing


def entries(items: list[Any], part: str | None, source: Path) -> Iterator[Page]:
    for item in items:
        if isinstance(item, str):
            yield page_at(item, None, part, source)
        elif "part" not in item:
            yield page_at(item.get("href"), item.get("text"), part, source)
        else:
            inner = str(item["part"])
            if inner.endswith(".qmd"):
                yield page_at(inner, None, inner, source)
            yield from entries(as_list(item.get("chapters")), inner, source)


def page_at(name: Any, label: str | None, part: str | None, source: Path) -> Page:
    if not isinstance(name, str) or not (source / name).is_file():
        raise BuildError(f"_quarto.yml names {name}: there is no such file")
    return Page(name, part, label)


# Pandoc ------------------------------------------------------------------------------------------


def render_pages(pages: list[Page], config: dict[str, Any], source: Path) -> list[Rendered]:
    def render(position: int) -> Rendered:
        sys.stdout.write(f"[{position + 1:2}/{len(pages)}] {pages[position].source}\n")
        sys.stdout.flush()
        return render_page(pages[position], config, source)

    with ThreadPoolExecutor(max_workers=2) as pool:
        futures = [pool.submit(render, position) for position in range(len(pages))]
        try:
            return [future.result() for future in futures]
        except BuildError:
            pool.shutdown(cancel_futures=True)
            raise


def render_page(page: Page, config: dict[str, Any], source: Path) -> Rendered:
    command = [pypandoc.get_pandoc_path(), *pandoc_arguments(page, config, source)]
    metadata = json.dumps(page_metadata(page, config))
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        file.write(metadata)
        file.flush()
        command.append(f"--metadata-file={file.name}")
        done = subprocess.run(command, cwd=source, capture_output=True, encoding="utf-8")
    if done.returncode != 0:
        raise BuildError(failure(done.stderr, page))
    if done.stderr.strip():
        print(done.stderr.strip(), file=sys.stderr)
    index, text = done.stdout.split("\n", 1)
    entry = json.loads(index)
    for name in ("include-in-header", "include-after-body"):
        text = text.replace(
            f"<!--{name}-->", included(html_options(config).get(name), page, source)
        )
    return Rendered(page, entry["title"], entry["targets"] or {}, text)


def pandoc_arguments(page: Page, config: dict[str, Any], source: Path) -> list[str]:
    options = html_options(config)
    arguments = [page.source, "--from=markdown", "--to=html5", "--mathml", "--wrap=preserve",
                 "--toc", f"--toc-depth={options.get('toc-depth', 3)}",
                 f"--template={HERE / 'template.html'}"]  # fmt: skip
    arguments += [f"--lua-filter={path}" for path in filters(config, source)]
    arguments.append(f"--lua-filter={HERE / 'plain.lua'}")
    for option in ("bibliography", "csl"):
        arguments += [f"--{option}={name}" for name in as_list(config.get(option))]
    return arguments


def card(book: dict[str, Any]) -> str | None:
    """The address of the picture that a shared link shows."""
    shared = book.get("open-graph")
    image = shared.get("image") if isinstance(shared, dict) else None
    return f"{book['site-url']}{image}" if image and book.get("site-url") else None


def page_metadata(page: Page, config: dict[str, Any]) -> dict[str, Any]:
    book = config["book"]
    footer = book.get("page-footer") or {}
    is_found = page.source != NOT_FOUND
    return {
        "address": f"{book['site-url']}/" if book.get("site-url") and is_found else None,
        "base": None if is_found else f"{urlsplit(book.get('site-url', '')).path}/",
        "url": page.url,
        "page": page.source,
        "root": page.root,
        "lang": config.get("lang", "en"),
        "book": {"title": book.get("title", ""), "repo-url": book.get("repo-url")},
        "link-citations": config.get("link-citations", False),
        "description": book.get("description", ""),
        "favicon": book.get("favicon"),
        "card": card(book),
        "style": [page.root + name for name in as_list(html_options(config).get("css"))],
        "footer": [footer[side] for side in ("left", "right") if footer.get(side)],
    }


def filters(config: dict[str, Any], source: Path) -> Iterator[Path]:
    """The book's own Lua filters, in order."""
    for entry in as_list(config.get("filters")):
        name = entry["path"] if isinstance(entry, dict) else entry
        if not (source / name).is_file():
            raise BuildError(f"_quarto.yml names the filter {name}: there is no such file")
        yield source / name


def included(value: Any, page: Page, source: Path) -> str:
    """The HTML of an include-… option: names of files, and {text: …}."""
    parts = []
    for entry in as_list(value):
        if isinstance(entry, dict):
            parts.append(entry["text"])
        elif (source / entry).is_file():
            parts.append((source / entry).read_text(encoding="utf-8"))
        else:
            raise BuildError(f"_quarto.yml includes {entry}: there is no such file")
    return re.sub(r'((?:href|src)=")/(?!/)', rf"\g<1>{page.root}", "\n".join(parts))


def failure(stderr: str, page: Page) -> str:
    """What stopped Pandoc on `page`, in one line, without a filter's traceback."""
    message = stderr.split("stack traceback:")[0]
    message = re.sub(r"^Error running filter .*?:\n", "", message)
    message = re.sub(r"^\S+\.lua:\d+: ", "", " ".join(message.split()))
    return message if page.source in message else f"{page.source}: {message}"


# What depends on other pages ---------------------------------------------------------------------


def all_targets(rendered: list[Rendered]) -> dict[str, Rendered]:
    """The page that each cross-reference leads to."""
    targets: dict[str, Rendered] = {}
    for entry in rendered:
        for name in entry.targets:
            if name in targets:
                first = targets[name].page.source
                raise BuildError(f"{entry.page.source}: #{name} is already used in {first}")
            targets[name] = entry
    return targets


def resolve_references(entry: Rendered, targets: dict[str, Rendered]) -> str:
    def reference(match: re.Match[str]) -> str:
        name = match[1]
        if name not in targets:
            kind = KINDS[name.split("-")[0]]
            raise BuildError(f"{entry.page.source}: @{name}: no page has a {kind} of that name")
        target = targets[name]
        words = html.escape(target.targets[name])
        page = "" if target is entry else relative(target.page.url, entry.page)
        return f'<a href="{page}#{name}" class="xref">{words}</a>'

    return REFERENCE.sub(reference, entry.text)


def relative(url: str, page: Page) -> str:
    return posixpath.relpath(url, posixpath.dirname(page.url) or ".")


def navigation(rendered: list[Rendered], current: Page) -> str:
    lines = []
    for part, group in itertools.groupby(rendered, lambda entry: entry.page.part):
        entries_of_part = list(group)
        if part and not part.endswith(".qmd"):
            lines.append(f'<p class="nav-part">{html.escape(part)}</p>')
        elif part and part != current.part:  # its first page stands for the others
            del entries_of_part[1:]
        lines.append("<ul>")
        for entry in entries_of_part:
            mark = ' aria-current="page"' if entry.page == current else ""
            address = relative(entry.page.url, current)
            lines.append(f'<li><a href="{address}"{mark}>{entry.label}</a></li>')
        lines.append("</ul>")
    return "\n".join(lines)


def pager(rendered: list[Rendered], entry: Rendered) -> str:
    if entry not in rendered:
        return ""
    current, position = entry.page, rendered.index(entry)
    links = []
    for step, name, word in ((-1, "prev", "Previous"), (1, "next", "Next")):
        if not 0 <= position + step < len(rendered):
            continue
        other = rendered[position + step]
        links.append(
            f'<a class="{name}" rel="{name}" href="{relative(other.page.url, current)}">'
            f"<span>{word}</span> {other.label}</a>"
        )
    return "\n".join(links)


def plain_text(markup: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]+>", "", markup)).split())


def sections(entry: Rendered, text: str) -> Iterator[dict[str, str]]:
    """What the search looks at, as in Quarto's search.json: a page's texts by their headings."""
    body = UNREAD.sub(" ", text[text.index("<main") : text.index("</main>")])
    _, *parts = HEADING.split(body)
    for attributes, heading, content in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        name = re.search(r'id="([^"]+)"', attributes)
        section = "" if 'class="title"' in attributes else plain_text(heading)
        href = entry.page.url + (f"#{name[1]}" if name and section else "")
        yield {
            "href": href,
            "title": plain_text(entry.title),
            "section": section,
            "text": plain_text(content),
        }


# Files -------------------------------------------------------------------------------------------


def write_feed(source: Path, site: Path) -> None:
    if not (source / FEED).is_file():
        return
    command = [pypandoc.get_pandoc_path(), "lua", FEED]
    environment = {**os.environ, "QUARTO_PROJECT_OUTPUT_DIR": str(site)}
    done = subprocess.run(command, cwd=source, env=environment, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise BuildError(f"{FEED}: {done.stderr.strip()}")


def copy_assets(config: dict[str, Any], source: Path, site: Path) -> None:
    for name in ("plain.css", "plain.js"):
        copy(BROWSER / name, site / "plain" / name)
    for pattern in as_list(config.get("project", {}).get("resources")):
        for path in source.glob(pattern.removeprefix("/")):
            copy(path, site / path.relative_to(source))


def copy_linked_files(entry: Rendered, source: Path, site: Path) -> None:
    """Copy the files that a page refers to; one that is nowhere stops the build."""
    folder = posixpath.dirname(entry.page.url)
    text = (site / entry.page.url).read_text(encoding="utf-8")
    for link in sorted(set(LOCAL_LINK.findall(text))):
        name = posixpath.normpath(posixpath.join(folder, html.unescape(link)))
        if (site / name).exists():
            continue
        if name.startswith("..") or not (source / name).is_file():
            raise BuildError(f"{entry.page.source}: it links to {link}: there is no such file")
        copy(source / name, site / name)


def copy(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, target)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def replace_folder(new: Path, folder: Path) -> None:
    """Put `new` where `folder` is; its files stay readable to a server that runs in it."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(new, folder, dirs_exist_ok=True)


if __name__ == "__main__":
    try:
        build(*(Path(folder).resolve() for folder in sys.argv[1:3]))
    except (BuildError, OSError) as error:
        sys.exit(f"error: {error}")
