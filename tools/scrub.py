"""Takes out of a recording what belongs to one machine and not to the book.

That is: paths, user and host names, terminal colours, progress bars, memory addresses, process
ids and the timestamps of logs. Needs only Python's standard library.
"""

from __future__ import annotations

import getpass
import re
import socket
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07|\x1b[@-_]")
ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{8,16}\b")
HOME = re.compile(r"(?<![\w.:])(?:/home/|/Users/|/root/|[A-Z]:\\Users\\)[^\s\"'<>]*")
ABSOLUTE = re.compile(r"(?<![\w.:/~<>)\]-])/(?!(?:dev|proc|sys|etc)/)(?:[\w.@+-]+/)+[\w.@+-]*")
COMMON_NAMES = {"root", "user", "runner", "ubuntu", "admin", "docker", "jovyan", "localhost"}

REWRITES = [
    (re.compile(r"/[^\s\"']*/ipykernel_\d+/\d+\.py"), "notebook-cell"),
    (re.compile(r"(?:file://)?/[^\s\"':]*/(?:site|dist)-packages/"), "site-packages/"),
    (re.compile(r"/[^\s\"':]*/lib/(python3\.\d+)/"), r"\1/"),
]
NOISE = [
    (ADDRESS, "0x…"),
    (re.compile(r"\[([WEIF])\d{4} \d\d:\d\d:\d\d\.\d+ "), r"[\1 "),
    (re.compile(r"(?m)^([WEIF])\d{4} \d\d:\d\d:\d\d\.\d+ \d+ "), r"\1 "),
    (re.compile(r"(?m)^\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?\s*"), ""),
    (re.compile(r" ?\[\d+:\d\d(?::\d\d)?<[^\]\n]*\]"), ""),
    (re.compile(r"(?i)\bpid([ =:]+)\d+"), r"pid\1…"),
]


class Scrubber:
    """Rewrites texts.

    ``words`` are those of the project's own code, which name no machine. ``cells`` maps the
    temporary file of each executed cell to the run's file and the cell's first line in it.
    """

    def __init__(
        self,
        root: Path,
        data_dir: Path | None = None,
        words: frozenset[str] = frozenset(),
        cells: Mapping[str, tuple[str, int]] | None = None,
    ):
        self.rewrites: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = []
        if data_dir:
            self._folder(data_dir, "data")
        self.rewrites += REWRITES
        self._folder(root, "")
        for folder in {tempfile.gettempdir(), "/tmp"}:
            self._folder(Path(folder), "tmp", random_part=True)
        self._folder(Path.home(), "~")
        self.rewrites += [(HOME, _shortened), (ABSOLUTE, _shortened)]
        self.names = machine_names(words)
        self.cells = cells or {}

    def _folder(self, folder: Path, replacement: str, random_part: bool = False) -> None:
        inside = f"{replacement}/" if replacement else ""
        part = r"(?:(?:tmp|[\w.-]*-)[a-z0-9_]{8}/)?" if random_part else ""
        for path in {str(folder), str(folder.resolve())} - {"/"}:
            start = r"(?:file://)?(?<![\w.])" + re.escape(path)
            self.rewrites.append((re.compile(rf"{start}/{part}"), inside))
            self.rewrites.append((re.compile(rf"{start}(?![\w.-])"), replacement or "."))

    def text(self, text: str) -> str:
        """A text without terminal codes, paths, names and noise."""
        text = ESCAPE.sub("", text)
        text = "\n".join(_after_returns(line) for line in text.split("\n"))
        text = re.sub(r'"([^"\n]+\.py)", line (\d+)', self._in_run, text)
        for pattern, replacement in (*self.rewrites, *NOISE, *self.names):
            text = pattern.sub(replacement, text)
        return text

    def _in_run(self, match: re.Match[str]) -> str:
        """A place in a cell's temporary file as the place in the run that it came from."""
        if match[1] not in self.cells:
            return match[0]
        file, first = self.cells[match[1]]
        return f'"{file}", line {first + int(match[2]) - 1}'

    def svg(self, svg: str) -> str:
        """An SVG without the paths and names; its path data is not searched for other paths."""
        for pattern, replacement in (*self.rewrites[:-1], *self.names):
            svg = pattern.sub(replacement, svg)
        return svg

    def bundle(self, data: dict[str, Any]) -> dict[str, Any]:
        """A display bundle with every text in it scrubbed."""
        return {mime: self._value(value, mime) for mime, value in data.items()}

    def _value(self, value: Any, mime: str) -> Any:
        if isinstance(value, dict):
            return {key: self._value(inner, mime) for key, inner in value.items()}
        if isinstance(value, list):
            return [self._value(inner, mime) for inner in value]
        if not isinstance(value, str) or (mime.startswith("image/") and "svg" not in mime):
            return value
        return self.svg(value) if "svg" in mime else self.text(value)


def machine_names(
    words: frozenset[str] = frozenset(),
) -> list[tuple[re.Pattern[str], str]]:
    """Patterns of this machine's user and host names, with what replaces them.

    A name that is also an ordinary word is only replaced where it can be nothing else.
    """
    found = []
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = ""
    host = socket.gethostname()
    for name, replacement in (
        (user, "user"),
        (host, "localhost"),
        (host.split(".")[0], "localhost"),
    ):
        if not name or name == "localhost":
            continue
        escaped = re.escape(name)
        if len(name) < 4 or name.lower() in COMMON_NAMES or name.lower() in words:
            found.append((re.compile(rf"(?<=@){escaped}\b|(?<=\[){escaped}(?=\]:\d)"), replacement))
            found.append((re.compile(rf"\b{escaped}(?=@\w)"), replacement))
        else:
            found.append((re.compile(rf"(?<![\w-]){escaped}(?![\w-])"), replacement))
    return found


def leaks(text: str, is_svg: bool = False) -> list[str]:
    """What in a recorded text still belongs to one machine."""
    patterns = [HOME, ESCAPE] if is_svg else [HOME, ESCAPE, ABSOLUTE, ADDRESS]
    found = [match[0] for pattern in patterns for match in pattern.finditer(text)]
    return list(dict.fromkeys(found))


def vocabulary(folders: list[Path]) -> frozenset[str]:
    """The lower-case words of all Python files in these folders."""
    found: set[str] = set()
    for folder in folders:
        for path in folder.rglob("*.py"):
            text = path.read_text(encoding="utf-8").lower()
            found.update(re.findall(r"[a-z0-9]+", text), re.findall(r"[\w-]+", text))
    return frozenset(found)


def _after_returns(line: str) -> str:
    """What a terminal shows of a line that goes back to its start."""
    parts = [part for part in line.split("\r") if part]
    return parts[-1] if parts else ""


def _shortened(match: re.Match[str]) -> str:
    last = re.split(r"[/\\]", match[0].rstrip("/\\"))[-1]
    return f"…/{last}"
