"""Trainings as commands, started fast."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from . import training_cases


@pytest.fixture(scope="session")
def fast_command(fast_bin: Path) -> Iterator[None]:
    """Trainings that a test starts as commands are forks of a process that has imported torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_cases, "PYTHON", str(fast_bin / "python"))
        yield
