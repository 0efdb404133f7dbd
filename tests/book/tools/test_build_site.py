"""tools/build_site.py, set_up.py and plain/preview.py. No test needs the network."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import build_site
import set_up

TOOLS = Path(__file__).resolve().parents[3] / "tools"

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """A copy of the tools beside a book of one page."""
    root = tmp_path / "book"
    root.mkdir()
    (root / "tools").mkdir()
    for name in ("arguments.py", "quoted.py", "set_up.py", "build_site.py"):
        shutil.copy(TOOLS / name, root / "tools")
    shutil.copytree(TOOLS / "plain", root / "tools/plain")
    shutil.copytree(TOOLS.parent / "theme/plain", root / "theme/plain")
    (root / "constraints.txt").touch()
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
        command = [sys.executable, str(book / "tools/build_site.py"), *arguments]
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


def test_plain_is_forced(run: Run, book: Path) -> None:
    done = run("--plain", quarto="exit 3")
    assert done.returncode == 0, done.stderr
    assert "[ 1/1] index.qmd" in done.stdout
    assert (book / "_site/index.html").is_file()


def test_without_quarto_pandoc_is_taken_and_the_reason_said_each_time(run: Run, book: Path) -> None:
    first, second = run(), run()
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert "trying to install quarto-cli" in first.stdout
    assert "trying to install" not in second.stdout
    for done in (first, second):
        assert "site: no Quarto: -m pip install failed: ERROR: No matching" in done.stdout
        assert "the plain build, made with Pandoc, stands in (make site WITH=quarto" in done.stdout
    assert (book / "_site/index.html").is_file()


def test_quarto_is_tried_again_when_asked(run: Run, book: Path) -> None:
    program(book / ".venv/bin/python", "echo still no luck >&2; exit 1")
    (book / ".venv/quarto-unavailable").write_text("no luck\n")
    done = run("--quarto")
    assert done.returncode == 1
    assert "trying to install quarto-cli" in done.stdout
    assert done.stderr == ("site: error: no Quarto: -m pip install failed: still no luck\n")


@pytest.mark.parametrize("demanded", [False, True])
def test_who_demands_quarto_waits_longer_for_it(
    empty: Path, monkeypatch: pytest.MonkeyPatch, demanded: bool
) -> None:
    waits = []
    monkeypatch.setattr(build_site, "NO_QUARTO", empty / ".venv/quarto-unavailable")
    monkeypatch.setattr(build_site, "OWN_QUARTO", empty / ".venv/bin/quarto")
    monkeypatch.setattr(build_site.shutil, "which", lambda _: None)
    monkeypatch.setattr(set_up, "make_venv", lambda: None)
    monkeypatch.setattr(set_up, "pip", lambda *_, seconds: waits.append(seconds))
    with contextlib.suppress(build_site.SiteError):
        build_site.find_quarto(demanded)
    (seconds,) = waits
    assert (seconds > 90) == demanded


def test_an_installed_quarto_is_taken(run: Run, book: Path) -> None:
    program(book / ".venv/bin/quarto", 'echo "own: $@"')
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


@pytest.mark.parametrize("arguments", [[], ["--plain"]])
def test_a_page_that_quarto_yml_forgets_is_named(
    run: Run, book: Path, arguments: list[str]
) -> None:
    (book / "runs").mkdir()
    (book / "runs/01-new.qmd").write_text("# New\n\n@fig-none\n")
    (book / "index.qmd").write_text("# Hello\n\nSee @sec-new.\n")
    done = run(*arguments, quarto="echo no section of that name >&2; exit 1")
    assert done.returncode == 1
    assert done.stderr.splitlines()[1:] == [
        "error: runs/01-new.qmd is not listed in _quarto.yml",
        "site: error: the site was not built; the reason is in the lines above",
    ]


def test_a_failing_quarto_fails_the_tool(run: Run) -> None:
    done = run(quarto="echo broken >&2; exit 4")
    assert done.returncode == 1
    assert "broken" in done.stderr
    assert "Traceback" not in done.stderr


def test_bad_options_are_one_line(run: Run) -> None:
    done = run("--port", "http")
    assert done.returncode == 2
    assert done.stderr == (
        "build_site.py: argument --port: invalid int value: 'http' (see --help)\n"
    )


# Set-up


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No .venv yet."""
    monkeypatch.setattr(set_up, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(set_up, "PYTHON", tmp_path / ".venv/bin/python")
    return tmp_path


def test_a_python_without_venv_is_told_what_to_install(
    empty: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program(empty / "python", "echo ensurepip is not available >&2; exit 1")
    monkeypatch.setattr(set_up.sys, "executable", str(empty / "python"))
    assert set_up.main(["lint"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("set_up.py: -m venv ")
    assert line.endswith("ensurepip is not available (apt-get install python3-venv may help)")


def test_a_group_is_installed_once_and_again_when_the_pins_change(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pins = empty / "constraints.txt"
    pins.touch()
    monkeypatch.setattr(set_up, "SOURCES", (pins, pins))
    program(set_up.PYTHON, f'echo "$@" >> {empty}/asked')

    def asked(group: str) -> list[str]:
        (empty / "asked").write_text("")
        assert set_up.main([group]) == 0
        return (empty / "asked").read_text().splitlines()

    upgrade, lint = asked("lint")
    assert upgrade.endswith(f"--constraint {pins} pip>=25.1")
    assert lint.endswith("--group lint")
    assert asked("lint") == []
    _, test, without_jupyter = asked("test")
    assert test.endswith("--group test -e .[train]")
    assert without_jupyter.endswith("--no-deps nbdistributed==0.1.0")
    assert asked("record") == []
    os.utime(pins, (2**33, 2**33))
    assert len(asked("lint")) == 2


def asked_of_pip(group: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    asked = []
    monkeypatch.setattr(set_up, "pip", lambda *what: asked.extend(what))
    assert set_up.main([group]) == 0
    return asked


@pytest.mark.parametrize(
    ("there", "group", "installed"),
    [
        ((), "stage", ["pip>=25.1", "-e", ".[train]"]),
        (("miniddp",), "stage", ["pip>=25.1", "-e", ".[train]"]),
        (("miniddp", "transformers"), "stage", []),
        (("miniddp", "transformers"), "exercise", ["pip>=25.1", "pytest"]),
        (("pytest",), "exercise", ["pip>=25.1", "-e", ".[train]", "pytest"]),
        (("miniddp", "pytest"), "exercise", []),
        (("miniddp", "transformers", "pytest"), "site", ["pip>=25.1", "--group", "site"]),
    ],
)
def test_any_torch_does_for_a_stage_and_an_exercise(
    empty: Path, monkeypatch: pytest.MonkeyPatch, there, group: str, installed: list[str]
) -> None:
    program(set_up.PYTHON, f'PYTHONPATH={empty}/modules exec {sys.executable} -S "$@"')
    for name in there:
        (empty / "modules" / name).mkdir(parents=True)
    assert asked_of_pip(group, monkeypatch) == installed


@pytest.mark.parametrize(
    ("version", "group", "said"),
    [
        ("2.14.1+cpu", "test", "==> torch 2.14.1 of .venv is replaced by 2.13.0"),
        ("2.14.1", "stage", "==> torch 2.14.1 of .venv is replaced by 2.13.0"),
        ("2.13.0", "test", None),
        ("2.13.0+cpu", "test", None),
        ("2.14.1", "lint", None),
        (None, "test", None),
    ],
)
def test_a_torch_is_not_replaced_without_a_word(
    empty: Path, monkeypatch: pytest.MonkeyPatch, capsys, version, group: str, said: str | None
) -> None:
    pins = empty / "constraints.txt"
    pins.write_text("numpy==2.0\ntorch==2.13.0\ntorchvision==0.1\n")
    monkeypatch.setattr(set_up, "SOURCES", (pins, pins))
    program(set_up.PYTHON, "exit 1")
    if version:
        packages = empty / ".venv/lib/python3.11/site-packages"
        (packages / f"torch-{version}.dist-info").mkdir(parents=True)
    asked_of_pip(group, monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"==> install what {group} needs", *([said] if said else [])]


@pytest.mark.parametrize(
    ("printed", "reason"),
    [
        (
            "WARNING: Retrying (…) after connection broken by 'NewConnectionError('<…>: Failed "
            "to establish a new connection: [Errno -2] Name or service not known')': /simple/ruff\n"
            "ERROR: ResolutionImpossible: for help visit https://example.org",
            "no connection: Name or service not known",
        ),
        (
            "  Error downloading Quarto: <urlopen error [Errno 111] Connection refused>\n"
            "  ValueError: nothing to open\nERROR: Failed building wheel for quarto-cli",
            "no connection: Connection refused",
        ),
        ("ERROR: No matching distribution\nsomething", "ERROR: No matching distribution"),
        ("  OSError: disk full\nERROR: failed", "OSError: disk full"),
        ("", "no message"),
    ],
)
def test_why_an_installation_failed_is_one_true_line(printed: str, reason: str) -> None:
    assert set_up.telling_line(printed) == reason


@pytest.mark.parametrize("given", [[], ["docs"], ["lint", "test"]])
def test_an_unknown_group_is_one_line(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        set_up.main(given)
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("(see --help)")


OLD_PYTHON = """
import datetime, runpy, sys
vars(datetime).pop("UTC")
sys.version_info, sys.version = (3, 10, 13), "3.10.13 (main)"
sys.path.insert(0, sys.argv[1].rpartition("/")[0])
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("tool", ["address", "build_site", "check", "record", "set_up"])
def test_an_old_python_is_one_line(tool: str) -> None:
    command = [sys.executable, "-c", OLD_PYTHON, str(TOOLS / f"{tool}.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"{tool}.py: Python 3.11 or later is needed, this is 3.10.13 "
        "(make PYTHON=… names another)\n"
    )


def test_pip_that_does_not_answer_is_given_up(empty: Path) -> None:
    program(set_up.PYTHON, "exec sleep 60")
    with pytest.raises(set_up.SetUpError, match=r"-m pip install: no answer within 0.2 s"):
        set_up.pip("anything", seconds=0.2)


# Preview


def test_a_port_in_use_is_said_before_anything_is_built(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("--preview", "--port", str(port))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == (
        f"site: error: port {port} cannot be used (Address already in use): "
        "PORT=… chooses another\n"
    )


def test_serving_needs_a_site_and_a_port(run: Run, book: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        arguments = ["--serve", "--port", str(taken.getsockname()[1])]
        done = run(*arguments)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == "site: error: there is no _site yet: make site\n"
        (book / "_site").mkdir()
        (book / "_site/index.html").touch()
        done = run(*arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"site: error: port {arguments[-1]} cannot be used (Address")
    assert len(done.stderr.splitlines()) == 1


def test_a_preview_of_a_book_that_cannot_be_built_ends(run: Run, book: Path) -> None:
    (book / "index.qmd").write_text("# Hello\n\n@fig-none\n")
    done = run("--preview", "--port", str(free_port()))
    assert done.returncode == 1
    assert done.stderr == "error: index.qmd: @fig-none: no page has a figure of that name\n"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def previewed(book: Path) -> Iterator[Callable[[str], str]]:
    """A preview of a book of three pages that runs; gives what it answers."""
    (book / "_quarto.yml").write_text("book: {title: B, chapters: [index.qmd, a.qmd, b.qmd]}\n")
    (book / "a.qmd").write_text('# A\n\nsymbol="miniddp.ring:send"\n')
    (book / "b.qmd").write_text('# B\n\nfile="src/miniddp/wire.py"\n')
    (book / "src/miniddp").mkdir(parents=True)
    for name in ("ring", "wire"):
        (book / f"src/miniddp/{name}.py").write_text("1\n")
    port = free_port()
    command = [sys.executable, book / "tools/plain/preview.py", book, book / "_preview", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        lines = iter(process.stdout.readline, "")
        said = [next(lines) for _ in range(4)]
        assert said[-1].startswith(f"site: http://127.0.0.1:{port}"), said

        def answer(path: str) -> str:
            try:
                address = f"http://127.0.0.1:{port}{path}"
                return urllib.request.urlopen(address, timeout=60).read().decode()
            except urllib.error.HTTPError:  # the site is being replaced
                return ""

        answer.lines = lines
        yield answer
        process.terminate()


@pytest.mark.parametrize(
    ("name", "text", "rendered"),
    [
        ("b.qmd", "# B again\n", ["[ 1/1] b.qmd\n"]),
        ("src/miniddp/ring.py", "2\n", ["[ 1/1] a.qmd\n"]),
        ("src/miniddp/wire.py", "2\n", ["[ 1/1] b.qmd\n"]),
        ("_quarto.yml", None, ["[ 1/3] index.qmd\n", "[ 2/3] a.qmd\n", "[ 3/3] b.qmd\n"]),
    ],
)
def test_only_what_a_change_concerns_is_rendered_and_shown(previewed, book, name, text, rendered):
    assert '<script src="/reload.js">' in previewed("/index.html")
    assert "/.version" in previewed("/reload.js"), "the page asks whether it changed"
    version = previewed("/.version")
    written = book.parent / "written"
    written.write_text(text or (book / name).read_text())
    written.replace(book / name)
    assert sorted(next(previewed.lines) for _ in rendered) == rendered
    while previewed("/.version") in (version, ""):
        time.sleep(0.05)
    if name == "b.qmd":
        assert "B again" in previewed("/b.html")
        assert "B again" in previewed("/a.html"), "the navigation of the others follows"
