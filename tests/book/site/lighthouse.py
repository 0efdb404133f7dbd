"""What Lighthouse says of every page of a site, as a table:

    python -m tests.book.site.lighthouse _site [--phone] [PAGE ...]

The site is served as static hosts do it: text goes compressed, and connections stay open. `kB` is
the weight of a page with all that it loads, uncompressed. Performance differs from run to run, on a
busy machine by much: below the table stands what kept a page from 100. The exit status is 1 where a
page has less in the other three.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from . import npm
from .serving import BROWSERS, Handler, serving

VERSION = "12.8.2"  # the last for Node 18
UNTIMED = ("accessibility", "best-practices", "seo")
CATEGORIES = ("performance", *UNTIMED)
COMPRESSED = {".html", ".css", ".js", ".json", ".svg"}


class Host(Handler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:  # noqa: N802
        path = Path(self.translate_path(self.path))
        if path.suffix not in COMPRESSED or not path.is_file():
            super().do_GET()
            return
        body = gzip.compress(path.read_bytes())
        self.send_response(200)
        self.send_header("Content-Type", self.guess_type(str(path)))
        self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def install() -> Path:
    return npm.install("lighthouse", VERSION)


def look(
    site: Path, pages: Iterable[str], categories: Iterable[str], screen: str = "desktop"
) -> Iterator[dict[str, Any]]:
    """What Lighthouse found on each page, as lighthouse.mjs prints it, and the page's name."""
    node = shutil.which("node")
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if node is None or browser is None:
        raise npm.UnavailableError(f"{'a browser' if node else 'node'} is not on PATH")
    folder = install()
    with serving(site, Host) as address:
        script = Path(__file__).with_suffix(".mjs")
        command = [node, str(script), str(folder), browser, screen, ",".join(categories)]
        command += [f"{address}/{page}" for page in pages]
        running = subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8")
        with running as process:
            assert process.stdout
            for line in process.stdout:
                found = json.loads(line)
                yield {"page": found["address"].removeprefix(f"{address}/"), **found}
        if process.returncode != 0:
            raise npm.UnavailableError(f"lighthouse.mjs ended with {process.returncode}")


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("site", type=Path)
    parser.add_argument("page", nargs="*", help="default: all")
    parser.add_argument("--phone", action="store_true", help="a slow phone, not a desktop")
    options = parser.parse_intermixed_args(given)
    site = options.site.resolve()
    pages = options.page or [
        str(path.relative_to(site))
        for path in sorted(site.rglob("*.html"))
        if path.name != "404.html"  # it names its files by the folder that the book lives in
    ]
    say = functools.partial(print, flush=True)
    say(f"{'page':32} {' '.join(f'{name:>14}' for name in CATEGORIES)}     kB requests")
    reasons = {}
    imperfect = False
    for found in look(site, pages, CATEGORIES, "phone" if options.phone else "desktop"):
        scores = " ".join(f"{found['scores'][name]:14}" for name in CATEGORIES)
        say(f"{found['page']:32} {scores} {found['bytes'] // 1000:6} {found['requests']:8}")
        reasons[found["page"]] = found["failed"]
        imperfect |= any(found["scores"][name] < 100 for name in UNTIMED)
    for page, failed in reasons.items():
        for reason in failed:
            say(f"{page}: {reason}")
    return int(imperfect)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except npm.UnavailableError as reason:
        sys.exit(f"lighthouse: {reason}")
