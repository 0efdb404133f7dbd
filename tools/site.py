#!/usr/bin/env python3
"""Make the book's site in _site: with Quarto, else with Pandoc (the plain build).

Needs nothing but Python 3.10. Quarto is taken from PATH, else from PyPI; where it cannot be had,
tools/plain makes the site with the Pandoc of the pypandoc_binary wheel.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv-site"
SCRIPTS = VENV / ("Scripts" if os.name == "nt" else "bin")
NO_QUARTO = VENV / "quarto-unavailable"  # why the installation failed; `make clean` removes it
QUARTO = "quarto-cli==1.7.34"
QUARTO_SECONDS = 90
PLAIN = ["pypandoc_binary>=1.14", "pyyaml>=6"]
WATCHED = ("_quarto.yml", "*.qmd", "*.bib", "*.md", "*.cff", "chapters", "runs", "src", "vis",
           "theme", "exercises", "tools", "tests/parity.json", "_extensions")  # fmt: skip


say = functools.partial(print, flush=True)  # in order with what the tools print


class SiteError(Exception):
    """What stopped the build, in one line."""


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    output = Path(options.output).resolve()
    try:
        if not (ROOT / "_quarto.yml").is_file():
            raise SiteError(f"no _quarto.yml in {ROOT}: there is no book to build")
        quarto = None if options.plain else find_quarto()
        if not quarto and not options.plain:
            say("site: no Quarto at hand: the plain build, made with Pandoc, stands in for it")
        if options.preview:
            preview(quarto, output, options.port)
        else:
            render(quarto, output)
            announce(output)
    except SiteError as error:
        print(f"site: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make the book's site.")
    parser.add_argument("--plain", action="store_true", help="use Pandoc even if Quarto is there")
    parser.add_argument("--output", default=ROOT / "_site", metavar="DIR", help="default: _site")
    parser.add_argument("--preview", action="store_true", help="serve, and render on each change")
    parser.add_argument("--port", type=int, default=8000, help="of the preview (default: 8000)")
    return parser.parse_args(arguments)


def find_quarto() -> str | None:
    """The Quarto to use: of PATH, else of PyPI; None where neither can be had."""
    on_path = shutil.which("quarto")
    if on_path:
        return on_path
    if NO_QUARTO.is_file():
        return None
    installed = SCRIPTS / "quarto"
    if not works(installed):
        make_venv()
        say(f"site: no Quarto on PATH: trying to install {QUARTO} from PyPI")
        reason = pip_install([QUARTO], seconds=QUARTO_SECONDS)
        if reason or not works(installed):
            NO_QUARTO.write_text(f"{reason or 'installed, but it does not run'}\n")
            return None
    return str(installed)


def works(quarto: Path) -> bool:
    if not quarto.exists():
        return False
    return subprocess.run([quarto, "--version"], capture_output=True).returncode == 0


def render(quarto: str | None, output: Path) -> None:
    if quarto:
        say(f"site: rendering with Quarto ({quarto})")
        command = [quarto, "render", "--output-dir", str(output)]
    else:
        command = plain_command(output)
    if subprocess.run(command, cwd=ROOT).returncode != 0:
        raise SiteError("the site was not built; the reason is in the lines above")


def plain_command(output: Path) -> list[str]:
    return [
        str(plain_python()),
        str(ROOT / "tools" / "plain" / "build.py"),
        "--output",
        str(output),
    ]


def plain_python() -> Path:
    """A Python that has what the plain build imports: this one, else that of .venv-site."""
    if all(importlib.util.find_spec(name) for name in ("pypandoc", "yaml")):
        return Path(sys.executable)
    make_venv()
    python = SCRIPTS / "python"
    check = [python, "-c", "import pypandoc, yaml"]
    if subprocess.run(check, capture_output=True).returncode != 0:
        say("site: installing Pandoc (the pypandoc_binary wheel) into .venv-site")
        reason = pip_install(PLAIN)
        if reason:
            raise SiteError(f"Pandoc could not be installed: {reason}")
    return python


def make_venv() -> None:
    if (SCRIPTS / "python").exists():
        return
    say("site: setting up .venv-site")
    made = subprocess.run([sys.executable, "-m", "venv", VENV], capture_output=True, text=True)
    if made.returncode != 0:
        shutil.rmtree(VENV, ignore_errors=True)
        raise SiteError(
            f"{sys.executable} -m venv failed: {last_line(made.stdout + made.stderr)} "
            "(on Debian and Ubuntu it needs: apt-get install python3-venv)"
        )


def pip_install(requirements: list[str], seconds: float | None = None) -> str | None:
    """Install into .venv-site; the reason if that failed."""
    constraints = ROOT / "constraints.txt"
    command = [str(SCRIPTS / "python"), "-m", "pip", "install", "--quiet",
               "--disable-pip-version-check", *requirements]  # fmt: skip
    if constraints.is_file():
        command += ["--constraint", str(constraints)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"no answer within {seconds:g} s"
    return last_line(done.stderr) if done.returncode else None


def last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else "no message"


def announce(output: Path) -> None:
    say(f"site: built in {output}")
    standard = output == ROOT / "_site"
    serve = "make serve" if standard else f"{sys.executable} -m http.server -d {output}"
    say(f"site: to read it: {serve}")


def preview(quarto: str | None, output: Path, port: int) -> None:
    """Serve the site on this machine and render it again whenever a source changes."""
    if quarto:
        command = [quarto, "preview", "--port", str(port), "--no-browser"]
        raise SystemExit(subprocess.run(command, cwd=ROOT).returncode)
    command = plain_command(output)
    subprocess.run(command, cwd=ROOT)
    seen = latest_change()
    serve(output, port)
    say(f"site: http://127.0.0.1:{port} (Ctrl+C ends the preview)")
    while True:
        time.sleep(0.5)
        changed = latest_change()
        if changed > seen:
            seen = changed
            subprocess.run(command, cwd=ROOT)


def serve(folder: Path, port: int) -> None:
    handler = functools.partial(QuietHandler, directory=str(folder))
    try:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
    except OSError as error:
        raise SiteError(
            f"port {port} cannot be used ({error}): choose another with --port"
        ) from error
    threading.Thread(target=server.serve_forever, daemon=True).start()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def latest_change() -> float:
    paths = [path for pattern in WATCHED for path in ROOT.glob(pattern)]
    files = [file for path in paths for file in (path.rglob("*") if path.is_dir() else [path])]
    return max((file.stat().st_mtime for file in files if file.is_file()), default=0.0)


if __name__ == "__main__":
    sys.exit(main())
