#!/usr/bin/env python3
"""Make the book's site in _site: with Quarto, else with Pandoc (the plain build).

Needs nothing but Python. Quarto is taken from PATH, else from PyPI; where it cannot be had,
tools/plain makes the site with the Pandoc of the pypandoc_binary wheel.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import arguments
import quoted
import set_up

ROOT = set_up.ROOT
SITE = ROOT / "_site"
OWN_QUARTO = set_up.BIN / "quarto"
NO_QUARTO = set_up.VENV / "quarto-unavailable"  # why the installation failed
QUARTO = "quarto-cli==1.10.18"  # the whole book was rendered with it, and with 1.7.34
QUARTO_SECONDS = 90
DEMANDED_SECONDS = 900  # who asks for Quarto waits for a slow network

say = functools.partial(print, flush=True)  # in order with what the tools print


class SiteError(Exception):
    """What stopped the build, in one line."""


def main(given: list[str]) -> int:
    options = parse(given)
    try:
        if not (ROOT / "_quarto.yml").is_file():
            raise SiteError(f"no _quarto.yml in {ROOT}: there is no book to build")
        if options.serve:
            return serve(options.port)
        if options.preview:
            return preview(options.port)
        build(None if options.plain else find_quarto(options.quarto))
    except (SiteError, set_up.SetUpError, OSError) as error:
        print(f"site: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def parse(given: list[str]) -> arguments.argparse.Namespace:
    parser = arguments.Parser(__doc__)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--plain", action="store_true", help="use Pandoc even if Quarto is there")
    mode.add_argument("--quarto", action="store_true", help="use Quarto; try again to install it")
    mode.add_argument("--preview", action="store_true", help="serve, and render what changes")
    mode.add_argument("--serve", action="store_true", help="only serve what was built")
    parser.add_argument("--port", type=int, default=8000, help="to serve at (default: 8000)")
    return parser.parse_args(given)


def find_quarto(demanded: bool) -> str | None:
    """The Quarto of PATH, else that of .venv; None where none can be had, unless it is demanded."""
    if on_path := shutil.which("quarto"):
        return on_path
    if works(OWN_QUARTO):
        return str(OWN_QUARTO)
    if demanded or not NO_QUARTO.is_file():
        reason = install_quarto(DEMANDED_SECONDS if demanded else QUARTO_SECONDS)
        if not reason:
            return str(OWN_QUARTO)
        NO_QUARTO.parent.mkdir(exist_ok=True)
        NO_QUARTO.write_text(f"{reason}\n", encoding="utf-8")
    reason = NO_QUARTO.read_text(encoding="utf-8").strip()
    if demanded:
        raise SiteError(f"no Quarto: {reason}")
    say(f"site: no Quarto: {reason}")
    say("site: the plain build, made with Pandoc, stands in (make site WITH=quarto tries again)")
    return None


def install_quarto(seconds: float) -> str | None:
    """Why it could not be installed from PyPI; None if it is there now."""
    say(f"site: no Quarto on PATH: trying to install {QUARTO} from PyPI")
    try:
        set_up.make_venv()
        set_up.pip("--no-deps", QUARTO, seconds=seconds)  # without all of Jupyter
    except set_up.SetUpError as error:
        return str(error)
    return None if works(OWN_QUARTO) else "it is installed, but it does not run"


def works(quarto: Path) -> bool:
    if not quarto.exists():
        return False
    return subprocess.run([quarto, "--version"], capture_output=True).returncode == 0


def build(quarto: str | None) -> None:
    if quarto:
        say(f"site: rendering with Quarto ({quarto})")
        command = [quarto, "render", "--output-dir", str(SITE)]
    else:
        command = [*plain("build"), str(SITE)]
    if subprocess.run(command, cwd=ROOT).returncode != 0:
        for problem in quoted.listing_problems(ROOT):
            print(f"error: {problem}", file=sys.stderr)
        raise SiteError("the site was not built; the reason is in the lines above")
    say(f"site: built in {SITE}")
    say("site: to read it: make serve")


def plain(tool: str) -> list[str]:
    """A tool of the plain build, with a Python that has what it imports: this one, or .venv's."""
    here = all(importlib.util.find_spec(name) for name in ("pypandoc", "yaml"))
    python = sys.executable if here else set_up.set_up("site")
    return [str(python), str(ROOT / "tools" / "plain" / f"{tool}.py"), str(ROOT)]


def preview(port: int) -> int:
    """Serve the plain build, render a page when it changes and reload the browser, until Ctrl+C.

    `quarto preview` does the same in three times the time; until 1.9 it may show the old page.
    """
    check_port(port)
    command = [*plain("preview"), str(ROOT / "_preview"), str(port)]
    return subprocess.run(command, cwd=ROOT).returncode


def serve(port: int) -> int:
    if not (SITE / "index.html").is_file():
        raise SiteError("there is no _site yet: make site")
    check_port(port)
    say(f"http://127.0.0.1:{port} (Ctrl+C ends it)")
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
    return subprocess.run([*command, "--directory", str(SITE)]).returncode


def check_port(port: int) -> None:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        raise SiteError(f"port {port} cannot be used ({reason}): PORT=… chooses another") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
