"""tools/address.py: one place says where the book lives, and nothing else names it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import address

NEW = ["https://you.example/book/", "https://git.example/you/book/", "trunk"]
NOTEBOOK = "runs/ranks.ipynb"
NAMING = (address.HOME, *address.REPEATED, NOTEBOOK)


@pytest.fixture
def book(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    for name in NAMING:
        shutil.copyfile(address.ROOT / name, tmp_path / name)
    return tmp_path


def test_nothing_else_names_the_address() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=address.ROOT, check=True, capture_output=True, text=True
    ).stdout
    now = address.current(address.ROOT)
    wanted = [now[key].split("://")[1].rstrip("/") for key in ("site-url", "repo-url")]
    naming = set()
    for name in filter(None, listed.split("\0")):
        path = address.ROOT / name
        text = path.read_text(encoding="utf-8", errors="ignore") if path.is_file() else ""
        if any(each in text for each in wanted):
            naming.add(name)
    recordings = {name for name in naming if name.startswith("recordings/")}  # in the first cell
    assert naming - recordings == set(NAMING)


def test_one_command_changes_it(book: Path) -> None:
    old = address.current(book)
    assert set(old) == set(address.KEYS)
    assert address.main(NEW, book) == 0
    assert address.current(book) == {
        "site-url": "https://you.example/book",
        "repo-url": "https://git.example/you/book",
        "repo-branch": "trunk",
    }
    for name in NAMING:
        text = (book / name).read_text(encoding="utf-8")
        assert old["repo-url"] not in text
        assert "https://git.example/you/book" in text
    assert "--branch=trunk" in (book / NOTEBOOK).read_text(encoding="utf-8")


def test_and_changes_it_back(book: Path) -> None:
    before = {name: (book / name).read_text(encoding="utf-8") for name in NAMING}
    old = address.current(book)
    address.main(NEW, book)
    address.main([old[key] for key in address.KEYS], book)
    assert {name: (book / name).read_text(encoding="utf-8") for name in NAMING} == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: SITE, REPO"),
        (["you.example", NEW[1]], "argument SITE: expected https://…, found 'you.example'"),
        (["https://a b", NEW[1]], "argument SITE: expected https://…, found 'https://a b'"),
        ([*NEW[:2], ""], "argument BRANCH: expected the name of a branch, found ''"),
    ],
)
def test_what_is_no_address_is_refused(
    book: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    before = (book / "_quarto.yml").read_text(encoding="utf-8")
    with pytest.raises(SystemExit) as stopped:
        address.main(arguments, book)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert (book / "_quarto.yml").read_text(encoding="utf-8") == before
