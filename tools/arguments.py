"""A command line whose errors are one line and end with status 2."""

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """``prog`` is the tool's file; ``description`` its docstring, shown as it is written."""

    def __init__(self, description: str | None):
        super().__init__(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see --help)\n")
