"""Set up .venv with what a kind of work needs: python tools/set_up.py lint|site|record|test

The groups stand in pyproject.toml; `record` and `test` bring torch and the package, `test` holds
the others. What is there already is not installed again. To train (`stage`) and for an `exercise`
any torch that is there does.
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
PACKAGE = ("-e", ".[train]")
GROUPS = {  # what pip is given
    "lint": ("--group", "lint"),
    "site": ("--group", "site"),
    "record": ("--group", "record", *PACKAGE),
    "test": ("--group", "test", *PACKAGE),
    "stage": PACKAGE,
    "exercise": (*PACKAGE, "pytest"),
}
IMPORTED = {"stage": ("miniddp", "transformers"), "exercise": ("miniddp", "pytest")}
NBDISTRIBUTED = "nbdistributed==0.1.0"  # what it depends on is there, but for all of Jupyter
SOURCES = (ROOT / "pyproject.toml", ROOT / "constraints.txt")


class SetUpError(Exception):
    """Why something could not be installed, in one line."""


def set_up(group: str) -> Path:
    """The Python of .venv, with the packages of a group."""
    if any(is_ready(name) for name in (group, "test")) or imports(*IMPORTED.get(group, ())):
        return PYTHON
    make_venv()
    print(f"==> install what {group} needs", flush=True)
    wanted = ("pytest",) if group == "exercise" and imports("miniddp") else GROUPS[group]
    if "-e" in wanted:
        tell_of_another_torch()
    pip("pip>=25.1")  # the first that knows dependency groups
    pip(*wanted)
    if group == "test":
        pip("--no-deps", NBDISTRIBUTED)
    stamp(group).touch()
    return PYTHON


def make_venv() -> None:
    if PYTHON.exists():
        return
    print("==> set up .venv", flush=True)
    call([sys.executable, "-m", "venv", str(VENV)], " (apt-get install python3-venv may help)")


def is_ready(group: str) -> bool:
    newest = max(source.stat().st_mtime for source in SOURCES)
    return stamp(group).exists() and stamp(group).stat().st_mtime >= newest


def imports(*modules: str) -> bool:
    """Whether the Python of .venv has these modules, of which there is one at least."""
    if not modules or not PYTHON.exists():
        return False
    asked = f"import importlib.util; all(map(importlib.util.find_spec, {modules})) or 1 / 0"
    return subprocess.run([PYTHON, "-c", asked], capture_output=True).returncode == 0


def tell_of_another_torch() -> None:
    pinned = re.search(r"(?m)^torch==(\S+)", SOURCES[1].read_text(encoding="utf-8"))
    for path in VENV.glob("lib*/python*/site-packages/torch-*.dist-info"):
        there = path.stem.removeprefix("torch-").partition("+")[0]
        if pinned and there != pinned[1]:
            print(f"==> torch {there} of .venv is replaced by {pinned[1]}", flush=True)
            return


def stamp(group: str) -> Path:
    return VENV / f".ready-{group}"


def pip(*what: str, seconds: float | None = None) -> None:
    """Install with the versions of constraints.txt."""
    command = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    call([*command, "--constraint", str(SOURCES[1]), *what], seconds=seconds)


def call(command: list[str], hint: str = "", seconds: float | None = None) -> None:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise SetUpError(f"{' '.join(command[1:4])}: no answer within {seconds:g} s") from None
    if done.returncode:
        reason = telling_line(done.stdout + done.stderr)
        raise SetUpError(f"{' '.join(command[1:4])} failed: {reason}{hint}")


def telling_line(said: str) -> str:
    """The last line that names an exception, else the last error of pip, else the last of all."""
    unreached = re.search(r"(?:new connection:|urlopen error) (?:\[.*?\] )?([^'>]+)", said)
    if unreached:
        return f"no connection: {unreached[1]}"
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
