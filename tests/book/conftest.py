"""The browser, the sites to look at in it, and the small book that the extension is tried on."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pypandoc
import pytest
from playwright.sync_api import Browser, BrowserContext, sync_playwright

from ..package.ranks import start_server
from .site.serving import BROWSERS, serving
from .site.sites import BEHAVIOUR, DESKTOP, PAGES, Sites, Visit

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--no-first-run"]  # fmt: skip
MEASURE = "COVERAGE_PROCESS_CONFIG"  # with it a new Python notes which lines it executes


@pytest.fixture(autouse=True, scope="module")
def _not_measured() -> Iterator[None]:
    """What these tests start is not the package's own; the server of ranks serves others too."""
    with pytest.MonkeyPatch.context() as patch:
        if MEASURE in os.environ:
            start_server()
            patch.delenv(MEASURE)
        yield


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Chromium or Chrome; without one the tests are skipped, and in CI they fail."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        reason = f"no browser on PATH (looked for {', '.join(BROWSERS)})"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


# Sites


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "visited" in metafunc.fixturenames:
        pages = BEHAVIOUR if metafunc.definition.get_closest_marker("behaviour") else PAGES
        names = [":".join(page) for page in pages]
        metafunc.parametrize("visited", pages, indirect=True, ids=names, scope="session")


@pytest.fixture(scope="session")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Sites:
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    (folder / "sites").mkdir(exist_ok=True)
    return Sites(folder / "sites")


@pytest.fixture(scope="session")
def servers(sites: Sites) -> Iterator[dict[str, str]]:
    """Serves every built site; the address of each by name."""
    running = ExitStack()

    class Addresses(dict[str, str]):
        def __missing__(self, name: str) -> str:
            self[name] = running.enter_context(serving(sites[name]))
            return self[name]

    with running:
        yield Addresses()


@pytest.fixture(scope="session")
def context(browser: Browser) -> Iterator[BrowserContext]:
    with browser.new_context(viewport=DESKTOP, reduced_motion="reduce") as context:
        context.set_default_timeout(5000)
        context.set_default_navigation_timeout(60_000)  # on a busy machine
        yield context


@pytest.fixture(scope="session")
def visited(
    request: pytest.FixtureRequest, context: BrowserContext, servers: dict[str, str]
) -> Iterator[Visit]:
    name, url = request.param
    address = servers[name]
    context.grant_permissions(["clipboard-read", "clipboard-write"], origin=address)
    visit = Visit(name, url, context.new_page())
    visit.page.on("request", lambda asked: visit.requests.append(asked.url))
    visit.page.on(
        "console",
        lambda said: said.type in ("error", "warning") and visit.complaints.append(said.text),
    )
    visit.page.on("pageerror", lambda error: visit.complaints.append(str(error)))
    visit.page.goto(f"{address}/{url}", wait_until="load")
    yield visit
    visit.page.close()


@pytest.fixture
def visit(visited: Visit) -> Iterator[Visit]:
    """The page as a reader with a light system finds it, whatever a test before did to it."""
    yield visited
    page = visited.page
    page.set_viewport_size(DESKTOP)
    page.emulate_media(media="screen", color_scheme="light")
    page.keyboard.press("Escape")
    page.mouse.move(0, 0)
    page.evaluate("localStorage.clear(); delete document.documentElement.dataset.theme")


# The extension

EXTENSION = Path(__file__).parent / "extension"
VERSION = tuple(int(part) for part in pypandoc.get_pandoc_version().split(".")[:2])
NO_HIGHLIGHT = "--syntax-highlighting=none" if VERSION >= (3, 8) else "--no-highlight"


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """The folder of a small book: `fixture`, the pages of `cases`, and the real extension."""
    root = tmp_path / "book"
    shutil.copytree(EXTENSION / "fixture", root)
    shutil.copytree(EXTENSION / "cases", root, dirs_exist_ok=True)
    real = Path(__file__).parents[2] / "_extensions/ddp-book"
    shutil.copytree(real, root / "_extensions/ddp-book")
    return root


@pytest.fixture
def render(book: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Render a page of the book, first written if `text` is given, with Pandoc alone."""

    def run(page: str, text: str | None = None, folder: str = ".", to: str = "html5"):
        if text is not None:
            (book / page).write_text(text, encoding="utf-8")
        working = book / folder
        up = Path(*[".."] * len(Path(folder).parts))
        command = [pypandoc.get_pandoc_path(), "--from", "markdown", "--to", to, "--wrap=none"]
        command += [NO_HIGHLIGHT, "--lua-filter", str(up / "_extensions/ddp-book/book.lua")]
        command += [str((book / page).relative_to(working))]
        return subprocess.run(
            command, cwd=working, capture_output=True, encoding="utf-8", timeout=60
        )

    return run


# Snippets


@pytest.fixture
def executed(record_property: Callable[[str, object], None]) -> Iterator[Counter[str]]:
    """How much of the code on the pages was executed, by what it is."""
    counts: Counter[str] = Counter()
    yield counts
    record_property("executed", dict(counts))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How much of the code on the pages was executed, in all."""
    counts: Counter[str] = Counter()
    for report in terminalreporter.stats.get("", []):
        counts.update(dict(report.user_properties).get("executed", {}))
    if counts:
        terminalreporter.section("code on the pages")
        for what, count in (+counts).items():
            terminalreporter.line(f"{count:5} {what}")
