"""A Python that starts at once."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def fast_bin() -> Iterator[Path]:
    """A folder with a Python that starts at once; with GPUs, which no fork may share, the real."""
    if torch.cuda.is_available() or sys.platform != "linux":
        yield Path(sys.executable).parent
        return
    from .forked import fast_bin as make_fast_bin

    with make_fast_bin() as folder:
        yield folder
