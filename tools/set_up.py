"""Set up .venv with what a kind of work needs: python tools/set_up.py lint|site|record|test

The groups stand in pyproject.toml; `record` and `test` bring torch and the package, `test` holds
the others. What is there already is not installed again.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import arguments

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if sys.platform == "win32" else "bin")
PYTHON = BIN / "python"
GROUPS = ("lint", "site", "record", "test")
NBDISTRIBUTED = "nbdistributed==0.1.0"  # what it depends on is there, but for all of Jupyter
SOURCES = (ROOT / "pyproject.toml", ROOT / "constraints.txt")


class SetUpError(Exception):
    """Why something could not be installed, in one line."""


def set_up(group: str) -> Path:
    """The Python of .venv, with the packages of a group."""
    if any(is_ready(name) for name in (group, "test")):
        return PYTHON
    make_venv()
    print(f"==> install what {group} needs", flush=True)
    pip("pip>=25.1")  # the first that knows dependency groups
    pip("--group", group, *(["-e", ".[train]"] if group in ("record", "test") else []))
    if group == "test":
        pip("--no-deps", NBDISTRIBUTED)
    stamp(group).touch()
    return PYTHON


def make_venv() -> None:
    if PYTHON.exists():
        return
    print("==> set up .venv", flush=True)
    call([sys.executable, "-m", "venv", str(VENV)], "apt-get install python3-venv may help")


def is_ready(group: str) -> bool:
    newest = max(source.stat().st_mtime for source in SOURCES)
    return stamp(group).exists() and stamp(group).stat().st_mtime >= newest


def stamp(group: str) -> Path:
    return VENV / f".ready-{group}"


def pip(*what: str, seconds: float | None = None) -> None:
    """Install with the versions of constraints.txt."""
    command = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    call([*command, "--constraint", str(SOURCES[1]), *what], "is there a network?", seconds)


def call(command: list[str], hint: str, seconds: float | None = None) -> None:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise SetUpError(f"{' '.join(command[1:4])}: no answer within {seconds:g} s") from None
    if done.returncode:
        reason = telling_line(done.stdout + done.stderr)
        raise SetUpError(f"{' '.join(command[1:4])} failed: {reason} ({hint})")


def telling_line(said: str) -> str:
    """The last line that names an exception, else the last error of pip, else the last of all."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    for pattern in (r"(\w+\.)*\w+Error: ", "ERROR: ", ""):
        if found := [line for line in lines if re.match(pattern, line)]:
            return found[-1]
    return "no message"


def main(given: list[str]) -> int:
    parser = arguments.Parser(__doc__)
    parser.add_argument("group", choices=GROUPS)
    group = parser.parse_args(given).group
    try:
        set_up(group)
    except (SetUpError, OSError) as error:
        print(f"set_up.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
