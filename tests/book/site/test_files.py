"""What the site's files promise without a browser: links that lead somewhere, nothing fetched,
headings in order, pictures with names."""

from __future__ import annotations

import html
import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlparse
from xml.etree import ElementTree

import pytest

import math_font
from plain import build

from .sites import BUILDS, ROOT, SAMPLE, Sites

FETCHED = {"script", "img", "source", "iframe", "video", "audio", "embed", "object"}
ATOM = "{http://www.w3.org/2005/Atom}"
LOADED_LINKS = {"stylesheet", "icon", "preload", "modulepreload", "prefetch", "preconnect"}


PUBLIC_HOST = re.compile(r"(?:[a-z0-9-]+\.)+[a-z]{2,}")
NOT_PUBLIC = (
    "local",
    "localhost",
    "internal",
    "intranet",
    "lan",
    "corp",
    "home",
    "test",
    "invalid",
)


class PageParser(HTMLParser):
    """Collects a page's names, its links and the addresses that a browser loads by itself; its
    headings, and its pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.headings: list[int] = []
        self.pictures: list[tuple[str, dict[str, str]]] = []
        self.texts: dict[str, str] = {}
        self.open_name = ""

    def handle_data(self, data: str) -> None:
        if self.open_name:
            self.texts[self.open_name] = self.texts.get(self.open_name, "") + data

    def handle_endtag(self, tag: str) -> None:
        self.open_name = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        self.open_name = values.get("id", "") if tag in ("title", "desc") else ""
        if re.fullmatch("h[1-6]", tag) and "unlisted" not in values.get("class", ""):
            self.headings.append(int(tag[1]))
        if tag in ("img", "svg"):
            self.pictures.append((tag, values))
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


def address_of(site: Path) -> str:
    """Where the book of this site is meant to live."""
    return build.read_config(SAMPLE if "sample" in site.name else ROOT)["book"]["site-url"]


def broken_links(path: Path, pages: dict[Path, PageParser], site: Path) -> list[str]:
    broken = []
    folder = f"{urlparse(address_of(site)).path}/"
    for link in pages[path].links:
        if urlparse(link).scheme or link.startswith("//"):
            continue
        if path.name == "404.html":  # a server shows it at any address
            link = link.removeprefix(folder) or "index.html"
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


def test_headings_are_in_order(pages: dict[Path, PageParser], site: Path) -> None:
    """One title, and no level left out on the way down."""
    for path, page in pages.items():
        where = str(path.relative_to(site))
        assert page.headings.count(1) == 1, where
        steps = [(a, b) for a, b in itertools.pairwise(page.headings) if b > a + 1]
        assert steps == [], where


def nameless(page: PageParser) -> list[str]:
    """The pictures that say nothing to those who do not see them."""
    found = []
    for tag, values in page.pictures:
        if values.get("aria-hidden") == "true":
            continue
        described = [page.texts.get(name, "") for name in values.get("aria-labelledby", "").split()]
        said = values.get("alt" if tag == "img" else "aria-label", "") or " ".join(described)
        if not said.strip() or (tag == "svg" and values.get("role") != "img"):
            found.append(f"<{tag} {values}>"[:160])
    return found


def test_every_picture_has_a_name(pages: dict[Path, PageParser], site: Path) -> None:
    assert any(page.pictures for page in pages.values())
    problems = {str(path.relative_to(site)): nameless(page) for path, page in pages.items()}
    assert {page: found for page, found in problems.items() if found} == {}


@pytest.mark.parametrize(
    ("html", "count"),
    [
        ('<svg role="img" aria-labelledby="a b"><title id="a">T</title></svg>', 0),
        ('<svg role="img" aria-label="A ring"></svg><img alt="A ring" src="a.png">', 0),
        ('<svg aria-hidden="true"></svg>', 0),
        ('<svg role="img" aria-labelledby="a"><desc id="b">T</desc></svg>', 1),
        ('<svg aria-label="A ring"></svg><img src="a.png"><img alt=" " src="a.png">', 3),
    ],
)
def test_what_a_nameless_picture_is(html: str, count: int) -> None:
    parser = PageParser()
    parser.feed(html)
    assert len(nameless(parser)) == count


def malformed(link: str) -> str:
    """What is wrong with a link to another site, or nothing."""
    parts = urlparse(link)
    if parts.scheme in ("", "mailto", "data", "javascript") and not link.startswith("//"):
        return ""
    host = parts.hostname or ""
    if parts.scheme != "https":
        return "is not https"
    if not PUBLIC_HOST.fullmatch(host) or host.rpartition(".")[2] in NOT_PUBLIC:
        return f"{host!r} is no public host"
    if parts.username or parts.port:
        return "names a user or a port"
    return "has a space or a bracket in it" if re.search(r"[\s<>{}|\\^`]", link) else ""


@pytest.mark.parametrize(
    ("link", "problem"),
    [
        ("https://arxiv.org/abs/1706.02677", ""),
        ("chapters/05-ring.html#a", ""),
        ("http://arxiv.org", "is not https"),
        ("//arxiv.org/abs", "is not https"),
        ("https://10.0.0.7/x", "'10.0.0.7' is no public host"),
        ("https://packages.corp/x", "'packages.corp' is no public host"),
        ("https://localhost/", "'localhost' is no public host"),
        ("https://arxiv.org:8080/", "names a user or a port"),
        ("https://arxiv.org/a b", "has a space or a bracket in it"),
    ],
)
def test_what_a_malformed_link_is(link: str, problem: str) -> None:
    assert malformed(link) == problem


def test_links_to_other_sites_are_well_formed(pages: dict[Path, PageParser], site: Path) -> None:
    problems = [
        f"{path.relative_to(site)}: {link} {malformed(link)}"
        for path, page in pages.items()
        for link in page.links
        if malformed(link)
    ]
    assert problems == []


def test_what_a_citation_leads_to_is_listed(pages: dict[Path, PageParser], site: Path) -> None:
    """Every citation leads to the list of references of its own page."""
    for path, page in pages.items():
        text = path.read_text(encoding="utf-8")
        cited = set(re.findall(r'href="#(ref-[^"]+)"[^>]*role="doc-biblioref"', text))
        assert cited <= set(page.names), path.relative_to(site)
        assert ("References</h2>" in text) == bool(cited), path.relative_to(site)


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


def test_a_shared_link_shows_a_picture(pages: dict[Path, PageParser], site: Path) -> None:
    base = address_of(site)
    for path in pages:
        text = path.read_text(encoding="utf-8")
        (shown,) = re.findall(r'<meta property="og:image" content="([^"]*)"', text)
        assert shown.startswith(f"{base}/"), path.name
        assert (site / shown.removeprefix(f"{base}/")).is_file(), path.name


def test_a_page_runs_nothing_but_the_files_of_the_site(pages: dict[Path, PageParser]) -> None:
    """Its policy comes first, allows no script but files of this site, and there is no other."""
    for path in pages:
        text = path.read_text(encoding="utf-8")
        (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
        rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
        assert rules["default-src"] == "'self'", path.name
        assert not {"script-src", "script-src-elem", "connect-src", "worker-src"} & set(rules)
        assert not re.search(r"https?:|\*|unsafe-eval", policy), path.name
        before = text[: text.index("Content-Security-Policy")]
        assert not re.search(r"<(script|link|style)\b", before), path.name
        inside = [
            code
            for attributes, code in re.findall(r"<script\b([^>]*)>(.*?)</script>", text, re.DOTALL)
            if code.strip() and "json" not in attributes
        ]
        assert inside == [], path.name
        assert not re.search(r"<[a-z][^<>]*\son[a-z]+=", text), path.name


def test_style_is_fetched_before_scripts_that_can_wait(pages: dict[Path, PageParser]) -> None:
    for path in pages:
        head = path.read_text(encoding="utf-8").partition("</head>")[0]
        last_style = head.rindex('rel="stylesheet"')
        waiting = re.search(r'<script[^>]*(?: defer|type="module")', head)
        assert waiting, path.name
        assert last_style < waiting.start(), path.name


def test_every_page_says_its_one_address(pages: dict[Path, PageParser], site: Path) -> None:
    base = address_of(site)
    sitemap = (site / "sitemap.xml").read_text(encoding="utf-8")
    for path in pages:
        text, url = path.read_text(encoding="utf-8"), f"{base}/{path.relative_to(site).as_posix()}"
        found = path.name != "404.html"
        assert re.findall(r'<link rel="canonical" href="([^"]*)"', text) == [url] * found
        assert (f"<loc>{url}</loc>" in sitemap) == found
        for data in re.findall(r'<script type="application/ld\+json">(.*?)</script>', text, re.S):
            told = json.loads(data)
            assert (told["@type"], told["url"]) == ("TechArticle", url)
            assert all([told["headline"], told["description"], told["isPartOf"]["name"]])
        assert text.count("application/ld+json") == found


def test_the_feed_tells_of_every_version(pages: dict[Path, PageParser], site: Path) -> None:
    source = SAMPLE if "sample" in site.name else ROOT
    changes = (source / "CHANGELOG.md").read_text(encoding="utf-8")
    feed = ElementTree.parse(site / "feed.xml").getroot()
    entries = feed.findall(f"{ATOM}entry")
    assert [entry.findtext(f"{ATOM}title") for entry in entries] == re.findall(
        r"^## (.+)$", changes, re.MULTILINE
    )
    days = [entry.findtext(f"{ATOM}updated", "") for entry in entries]
    assert all(re.fullmatch(r"\d{4}-\d{2}-\d{2}T00:00:00Z", day) for day in days)
    assert days == sorted(days, reverse=True)
    assert feed.findtext(f"{ATOM}updated") == days[0]
    names = [entry.findtext(f"{ATOM}id", "") for entry in entries]
    assert len(set(names)) == len(names)
    assert all(name.startswith(f"{address_of(site)}/feed.xml#") for name in names)
    told = "".join(entry.findtext(f"{ATOM}content", "") for entry in entries)
    assert told.count("<li>") == len(re.findall("^- ", changes, re.MULTILINE))
    assert source == ROOT or "<code>a &lt; b</code> &amp; more." in told
    for path, page in pages.items():
        linked = [link for link in page.links if link.endswith("feed.xml")]
        assert linked, path


def test_the_font_has_every_sign_of_the_formulas(pages: dict[Path, PageParser]) -> None:
    for path in pages:
        formulas = re.findall(r"<math.*?</math>", path.read_text(encoding="utf-8"), re.DOTALL)
        text = re.sub(r"<annotation.*?</annotation>|<[^>]*>", "", "".join(formulas), flags=re.S)
        signs = set(html.unescape(text)) - {"\n"}
        assert signs <= math_font.CHARACTERS, f"{path.name}: tools/math_font.py lacks them"


@pytest.mark.parametrize(
    "part",
    [
        'data-note="1"',
        'role="tab"',
        "data-tip=",
        "<math",
        "takeaways",
        "doc-biblioref",
        "<ins>",
        'class="folded"',
        'class="predict"',
    ],
)
def test_the_sample_holds_what_the_browser_tests_look_at(sites: Sites, part: str) -> None:
    text = (sites["sample-plain"] / "chapters/01-everything.html").read_text(encoding="utf-8")
    assert part in text


@pytest.mark.parametrize("name", BUILDS)
def test_the_site_holds_nothing_of_the_tests(sites: Sites, name: str) -> None:
    found = {path.relative_to(sites[name]).as_posix() for path in sites[name].rglob("*")}
    assert [path for path in sorted(found) if path.startswith(("tests", "tools", "src"))] == []
