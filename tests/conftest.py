"""One browser for all tests that look at pages, and the table of parity with torch."""

import multiprocessing
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Browser, sync_playwright

from .forked import IMPORTED
from .forked import fast_bin as make_fast_bin
from .parity import (  # noqa: F401
    pytest_addoption,
    pytest_configure,
    pytest_runtest_logreport,
    pytest_sessionfinish,
)

# What is installed beside this Python is found, Quarto among it.
os.environ["PATH"] = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--no-first-run"]  # fmt: skip


MEASURE = "COVERAGE_PROCESS_CONFIG"  # with it a new Python notes which lines it executes


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """The ranks of a test are forks of one server. What it has imported, they need not import.

    Where there are GPUs it has to stay without dynamo (miniddp.launch), so without all of these.
    It is measured whichever test starts it, and with it are all its forks.
    """
    context = multiprocessing.get_context("forkserver")
    preload, config = context.set_forkserver_preload, os.environ.get(MEASURE)

    def start(modules: list[str]) -> None:
        preload([*modules, *(IMPORTED if "torch._dynamo" in modules else ())])
        with pytest.MonkeyPatch.context() as patch:
            if config:
                patch.setenv(MEASURE, config)
            forkserver.ensure_running()

    context.set_forkserver_preload = start


LONGEST = ("test_pages", "test_commands", "test_faults", "test_ddp", "test_soak", "test_stages",
           "test_interactive", "test_train", "test_data_parallel")  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest begin first: else one of them ends alone."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.fixture(autouse=True, scope="module")
def _measured(request: pytest.FixtureRequest) -> Iterator[None]:
    """Only the package's own tests, and those of runs, measure what their processes cover."""
    with pytest.MonkeyPatch.context() as patch:
        if not {"package", "finetune", "endurance"} & set(request.path.parts):
            patch.delenv(MEASURE, raising=False)
        yield


@pytest.fixture(scope="session")
def fast_bin() -> Iterator[Path]:
    """A folder with a Python that starts at once; with GPUs, which no fork may share, the real."""
    if torch.cuda.is_available() or sys.platform != "linux":
        yield Path(sys.executable).parent
        return
    with make_fast_bin() as folder:
        yield folder


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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How much of the code on the pages was executed."""
    counts: Counter[str] = Counter()
    for report in terminalreporter.stats.get("", []):
        counts.update(dict(report.user_properties).get("executed", {}))
    if counts:
        terminalreporter.section("code on the pages")
        for what, count in (+counts).items():
            terminalreporter.line(f"{count:5} {what}")
