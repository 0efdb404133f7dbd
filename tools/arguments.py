"""A command line whose errors are one line and end with status 2: an old Python is the first.

Each tool imports this before anything that an old Python has not.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn

if sys.version_info < (3, 11):  # noqa: UP036
    sys.stderr.write(
        f"{Path(sys.argv[0]).name}: Python 3.11 or later is needed, this is "
        f"{sys.version.split()[0]} (make PYTHON=… names another)\n"
    )
    sys.exit(2)


class Parser(argparse.ArgumentParser):
    """``prog`` is the tool's file; ``description`` its docstring, shown as it is written."""

    def __init__(self, description: str | None):
        super().__init__(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see --help)\n")
