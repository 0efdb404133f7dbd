"""tools/site.py: which tool it takes, what it says, how it fails. No test needs the network."""

from __future__ import annotations

import importlib.util
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def tool() -> ModuleType:
    """The module; its name is also that of a module of Python's library."""
    spec = importlib.util.spec_from_file_location("book_site", TOOLS / "site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """A copy of the tools beside a book of one page."""
    root = tmp_path / "book"
    root.mkdir()
    (root / "tools").mkdir()
    shutil.copy(TOOLS / "site.py", root / "tools")
    shutil.copytree(TOOLS / "plain", root / "tools/plain")
    (root / "_quarto.yml").write_text("book: {title: Small, chapters: [index.qmd]}\n")
    (root / "index.qmd").write_text("# Hello\n")
    return root


@pytest.fixture
def run(book: Path, tmp_path: Path) -> Run:
    """Run the tool with nothing on PATH but these executables (name=script)."""

    def site(*arguments: str, **scripts: str) -> subprocess.CompletedProcess[str]:
        path = tmp_path / "path"
        path.mkdir(exist_ok=True)
        for name, text in scripts.items():
            program(path / name, text)
        command = [sys.executable, str(book / "tools/site.py"), *arguments]
        environment = {**os.environ, "PATH": str(path), "PIP_NO_INDEX": "1"}
        environment.pop("PIP_FIND_LINKS", None)
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=120, cwd=tmp_path
        )

    return site


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_quarto_of_path_is_taken(run: Run, book: Path) -> None:
    done = run(quarto='echo "asked: $@"; echo "in: $PWD"')
    assert done.returncode == 0, done.stderr
    assert f"asked: render --output-dir {book / '_site'}" in done.stdout
    assert f"in: {book}" in done.stdout
    assert done.stdout.rstrip().endswith("site: to read it: make serve")


def test_plain_is_forced_and_goes_where_it_is_told(run: Run, tmp_path: Path) -> None:
    done = run("--plain", "--output", "elsewhere", quarto="exit 3")
    assert done.returncode == 0, done.stderr
    assert "[ 1/1] index.qmd" in done.stdout
    assert "http.server -d" in done.stdout
    assert (tmp_path / "elsewhere/index.html").is_file()


def test_without_quarto_pandoc_is_taken_and_the_failure_remembered(run: Run, book: Path) -> None:
    first = run()
    assert first.returncode == 0, first.stderr
    assert "trying to install quarto-cli" in first.stdout
    assert first.stdout.count("the plain build, made with Pandoc, stands in") == 1
    assert (book / "_site/index.html").is_file()
    assert (book / ".venv-site/quarto-unavailable").read_text().strip()
    second = run()
    assert second.returncode == 0, second.stderr
    assert "trying to install" not in second.stdout


def test_an_installed_quarto_is_taken(run: Run, book: Path) -> None:
    program(book / ".venv-site/bin/quarto", 'echo "own: $@"')
    done = run()
    assert done.returncode == 0, done.stderr
    assert "own: render" in done.stdout


@pytest.mark.parametrize("arguments", [[], ["--plain"]])
def test_no_book_is_one_clear_line(run: Run, book: Path, arguments: list[str]) -> None:
    (book / "_quarto.yml").unlink()
    done = run(*arguments, quarto="exit 0")
    assert done.returncode == 1
    assert done.stderr == f"site: error: no _quarto.yml in {book}: there is no book to build\n"


def test_an_error_in_the_book_ends_without_a_traceback(run: Run, book: Path) -> None:
    (book / "index.qmd").write_text("# Hello\n\n@fig-none\n")
    done = run("--plain")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "error: index.qmd: @fig-none: no page has a figure of that name",
        "site: error: the site was not built; the reason is in the lines above",
    ]


def test_a_failing_quarto_fails_the_tool(run: Run) -> None:
    done = run(quarto="echo broken >&2; exit 4")
    assert done.returncode == 1
    assert "broken" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_python_without_venv_is_told_what_to_install(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "python"
    program(broken, "echo ensurepip is not available >&2; exit 1")
    monkeypatch.setattr(tool, "VENV", tmp_path / "venv")
    monkeypatch.setattr(tool, "SCRIPTS", tmp_path / "venv/bin")
    monkeypatch.setattr(tool.sys, "executable", str(broken))
    with pytest.raises(tool.SiteError, match=r"ensurepip is not available .*python3-venv"):
        tool.make_venv()


def test_pip_that_does_not_answer_is_given_up(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "python", "exec sleep 60")
    monkeypatch.setattr(tool, "SCRIPTS", tmp_path)
    assert tool.pip_install(["anything"], seconds=0.2) == "no answer within 0.2 s"


def test_a_port_in_use_is_said(tool: ModuleType, tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(tool.SiteError, match=f"port {port} cannot be used"):
            tool.serve(tmp_path, port)


def test_the_watch_sees_a_changed_chapter(
    tool: ModuleType, book: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "ROOT", book)
    before = tool.latest_change()
    chapter = book / "chapters/01-new.qmd"
    chapter.parent.mkdir()
    chapter.write_text("# New\n")
    os.utime(chapter, (before + 10, before + 10))
    assert tool.latest_change() == pytest.approx(before + 10)
