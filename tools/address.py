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


class AddressError(Exception):
    """Why the address cannot be changed, in one line."""


def main(arguments: list[str], root: Path = ROOT) -> int:
    parser = Parser(__doc__)
    parser.add_argument("site", type=address, metavar="SITE", help="https://you.github.io/book/")
    parser.add_argument("repository", type=address, metavar="REPO",
                        help="https://github.com/you/book")  # fmt: skip
    parser.add_argument("branch", type=branch, metavar="BRANCH", nargs="?", default="main",
                        help="what links into the repository name (default: main)")  # fmt: skip
    given = parser.parse_args(arguments)
    try:
        move(root, given.site, given.repository, given.branch)
    except (AddressError, OSError) as error:
        print(f"address.py: {error}", file=sys.stderr)
        return 1
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
    if missing := [key for key in KEYS if key not in old]:
        raise AddressError(f"{HOME} lacks {', '.join(missing)}: nothing was changed")
    new = dict(zip(KEYS, values, strict=True))
    quoted = {f'"{old["repo-url"]}"': f'"{new["repo-url"]}"'}
    cell = {old["repo-url"]: new["repo-url"]}
    cell |= {f"--branch={old['repo-branch']}": f"--branch={new['repo-branch']}"}
    changes = {root / name: quoted for name in REPEATED}
    changes |= {path: cell for pattern in NOTEBOOKS for path in root.glob(pattern)}
    # The last, so that the same command goes on where a write failed.
    changes[root / HOME] = {f" {key}: {old[key]}\n": f" {key}: {new[key]}\n" for key in KEYS}
    texts = {path: replaced(path, pairs) for path, pairs in changes.items()}
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")


def replaced(path: Path, pairs: dict[str, str]) -> str:
    text = path.read_text(encoding="utf-8")
    for old, new in pairs.items():
        text = text.replace(old, new)
    return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
