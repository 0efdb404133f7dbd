"""`python -m instruments.trace_tables FOLDER`."""

import sys
from pathlib import Path

from instruments.trace_tables import MAKERS, TABLES, table


def main(folder: str) -> None:
    """Write all tables."""
    for name in MAKERS:
        text = table(name, Path(folder))
        (TABLES / f"{name}.csv").write_text(text, encoding="utf-8")
        print(f"{name}: {text.count(chr(10)) - 1} rows")


if __name__ == "__main__":
    main(sys.argv[1])
