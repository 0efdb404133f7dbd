"""The messages that the page of errors explains: the very words, where it says that they stand."""

from __future__ import annotations

import html
import os
import re
import shutil
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "appendix/errors.qmd"
ROW = re.compile(r"^ *\| `([^`]+)` +\| (.+?) +\| `([^`]+)` *\|$", re.MULTILINE)
ROWS = ROW.findall(PAGE.read_text(encoding="utf-8"))
TORCH = Path(torch.__file__).parent


def places(name: str) -> Iterator[Path]:
    """Where a file of another package may be installed."""
    packages = TORCH.parent / "nvidia"
    yield from packages.glob(f"*/lib/{name}")
    for folder in ("/usr/lib", "/usr/lib64"):
        yield from Path(folder).glob(f"*/slurm*/{name}")
    if found := shutil.which(name, path=f"/usr/sbin:{os.environ['PATH']}"):
        yield Path(found)


@cache
def content(name: str) -> bytes | None:
    """Of the file that the page names; None if it is not installed here."""
    if name.startswith("python/"):
        return (Path(os.__file__).parent / name.removeprefix("python/")).read_bytes()
    files = [TORCH / name] if "/" in name else list(places(name))
    return next((file.read_bytes() for file in files if file.exists()), None)


def test_there_are_messages_of_every_part() -> None:
    assert len(ROWS) >= 80
    assert len({message for message, _, _ in ROWS}) == len(ROWS)
    assert {where for _, _, where in ROWS} >= {"libnccl.so.2", "slurmstepd", "lib/libtorch_cpu.so"}


@pytest.mark.parametrize(("message", "where"), [(message, where) for message, _, where in ROWS])
def test_the_words_stand_in_the_file(message: str, where: str) -> None:
    if where in ("libc", "libstdc++"):
        pytest.skip("has a test of its own")
    found = content(where)
    if found is None:
        pytest.skip(f"{where} is not installed here")
    for words in filter(None, re.split(" *… *", message)):
        assert words.encode() in found, words


@pytest.mark.skipif(sys.platform != "linux", reason="the words of Linux's C library")
def test_the_words_of_the_system() -> None:
    import errno

    assert os.strerror(errno.ECONNRESET) == "Connection reset by peer"
    library = Path("/usr/lib").rglob("libstdc++.so.6")
    found = next((file.read_bytes() for file in library), None)
    if found is None:
        pytest.skip("no libstdc++ in /usr/lib")
    assert b"terminate called without an active exception" in found


def test_the_built_page_has_every_message(tmp_path: Path) -> None:
    """Where a search looks: in the text of the page."""
    site = Path(os.environ.get("BOOK_SITE", "none"))
    page = site / "appendix/errors.html"
    if not page.exists():
        pytest.skip("no site was built before (BOOK_SITE)")
    text = html.unescape(re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8")))
    missing = [message for message, _, _ in ROWS if message not in text]
    assert not missing
