"""What the tests of the pages' code executed is told at the end of the tests."""

from __future__ import annotations

from collections import Counter

import pytest

EXECUTED = pytest.StashKey["Counter[str]"]()


@pytest.fixture
def executed(request: pytest.FixtureRequest) -> Counter[str]:
    """How much was executed, by what it is."""
    return request.config.stash.setdefault(EXECUTED, Counter())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts = terminalreporter.config.stash.get(EXECUTED, None)
    if counts:
        terminalreporter.section("code on the pages")
        for what, count in (+counts).items():
            terminalreporter.line(f"{count:5} {what}")
