"""Programs that pages show, run as torchrun would run them."""

import runpy
from pathlib import Path

from miniddp import run_ranks


def run_on_ranks(program: Path, ranks: int = 2) -> None:
    """Each starts and ends its process group by itself, and must end without an error."""
    run_ranks(run, ranks, program, backend=None, timeout=300)


def run(rank: int, program: Path) -> None:
    runpy.run_path(str(program), run_name="__main__")
