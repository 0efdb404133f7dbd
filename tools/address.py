"""Say where the book lives; `make address` calls this.

    python tools/address.py SITE REPO [BRANCH]

_quarto.yml holds the three, and all of the book reads them there. What other programs read has to
repeat the repository's address: CITATION.cff, pyproject.toml, the first cell of each notebook.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from arguments import Parser

ROOT = Path(__file__).resolve().parent.parent
HOME = "_quarto.yml"
REPEATED = ("CITATION.cff", "pyproject.toml")
NOTEBOOKS = ("recordings/*.ipynb", "runs/*.ipynb")
KEYS = ("site-url", "repo-url", "repo-branch")


def main(arguments: list[str], root: Path = ROOT) -> int:
    parser = Parser(__doc__)
    parser.add_argument("site", type=address, metavar="SITE", help="https://you.github.io/book/")
    parser.add_argument("repository", type=address, metavar="REPO",
                        help="https://github.com/you/book")  # fmt: skip
    parser.add_argument("branch", type=branch, metavar="BRANCH", nargs="?", default="main",
                        help="what links into the repository name (default: main)")  # fmt: skip
    given = parser.parse_args(arguments)
    move(root, given.site, given.repository, given.branch)
    print(f"{', '.join((HOME, *REPEATED))} name {given.repository}")
    return 0


def address(text: str) -> str:
    if not re.fullmatch(r"https?://[^\s\"'#]+", text):
        raise argparse.ArgumentTypeError(f"expected https://…, found {text!r}")
    return text.removesuffix("/")


def branch(text: str) -> str:
    if not re.fullmatch(r"[\w./-]+", text):
        raise argparse.ArgumentTypeError(f"expected the name of a branch, found {text!r}")
    return text


def current(root: Path) -> dict[str, str]:
    """`site-url`, `repo-url` and `repo-branch` of _quarto.yml."""
    text = (root / HOME).read_text(encoding="utf-8")
    return dict(re.findall(rf"^ +({'|'.join(KEYS)}): (\S+)$", text, re.MULTILINE))


def move(root: Path, *values: str) -> None:
    old = current(root)
    new = dict(zip(KEYS, values, strict=True))
    for key, value in new.items():
        replace(root / HOME, f" {key}: {old[key]}\n", f" {key}: {value}\n")
    for name in REPEATED:
        replace(root / name, f'"{old["repo-url"]}"', f'"{new["repo-url"]}"')
    for path in (path for pattern in NOTEBOOKS for path in root.glob(pattern)):
        replace(path, old["repo-url"], new["repo-url"])
        replace(path, f"--branch={old['repo-branch']}", f"--branch={new['repo-branch']}")


def replace(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
