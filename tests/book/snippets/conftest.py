"""What the tests of the pages' code executed is told at the end of the tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import pytest


@pytest.fixture
def executed(record_property: Callable[[str, object], None]) -> Iterator[Counter[str]]:
    """How much was executed, by what it is."""
    counts: Counter[str] = Counter()
    yield counts
    record_property("executed", dict(counts))
