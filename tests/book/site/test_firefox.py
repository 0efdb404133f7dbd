"""The reader's tour in Firefox, driven over WebDriver BiDi."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from . import npm

BROWSERS = ("firefox", "firefox-esr")


def test_search_notes_and_a_moving_diagram(servers: dict[str, str]) -> None:
    firefox = next(filter(None, map(shutil.which, BROWSERS)), None)
    if firefox is None:
        pytest.skip(f"no Firefox on PATH (looked for {', '.join(BROWSERS)})")
    try:
        folder = npm.install("puppeteer-core", "23.11.1")
    except npm.UnavailableError as reason:
        pytest.skip(f"nothing to drive Firefox with: {reason}")
    script = str(Path(__file__).with_name("firefox.mjs"))
    done = subprocess.run(
        ["node", script, str(folder), firefox, servers["sample-plain"]],
        capture_output=True,
        encoding="utf-8",
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen.pop("found").split("#")[0].endswith("/chapters/01-everything.html")
    assert seen.pop("width") <= 360
    assert seen == {"problems": [], "noteIsBesideItsLine": True, "ringMoves": True}
