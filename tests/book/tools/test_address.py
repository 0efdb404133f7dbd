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


def texts(book: Path) -> dict[str, str]:
    paths = [path for path in book.rglob("*") if path.is_file()]
    return {path.name: path.read_text(encoding="utf-8") for path in paths}


def test_a_missing_file_is_one_line_and_nothing_is_changed(
    book: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (book / "pyproject.toml").unlink()
    before = texts(book)
    assert address.main(NEW, book) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("address.py: ")
    assert line.endswith("/pyproject.toml'")
    assert texts(book) == before


def test_missing_keys_are_one_line_and_nothing_is_changed(
    book: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = book / address.HOME
    lines = home.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if " repo-url:" not in line and " repo-branch:" not in line]
    home.write_text("".join(kept), encoding="utf-8")
    before = texts(book)
    assert address.main(NEW, book) == 1
    assert capsys.readouterr().err == (
        "address.py: _quarto.yml lacks repo-url, repo-branch: nothing was changed\n"
    )
    assert texts(book) == before


def test_a_failed_write_is_one_line_and_the_same_command_goes_on(
    book: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_text

    def full(path: Path, *arguments: str, **named: str) -> int:
        if path.name == "pyproject.toml":
            raise OSError("disk full")
        return write(path, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        assert address.main(NEW, book) == 1
    assert capsys.readouterr().err == "address.py: disk full\n"
    assert address.main(NEW, book) == 0
    for name in NAMING:
        assert "https://git.example/you/book" in (book / name).read_text(encoding="utf-8")
