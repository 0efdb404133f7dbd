"""Ask every other site that the book links to whether the page is still there.

    python tools/links.py _site

Needs a network and only Python's standard library. A site that turns away programs is reported,
and no error.
"""

from __future__ import annotations

import re
import sys
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from html import unescape
from pathlib import Path
from urllib.parse import urldefrag

AGENT = "Mozilla/5.0 (compatible; the link check of DDP from Scratch)"
SECONDS = 20
TRIES = 3
TURNED_AWAY = (401, 403, 405, 406, 418, 429, 503)
OWN = re.compile(r"https://(?:github\.com/)?ddp-from-scratch[./]")


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        print("links.py: say where the site is: python tools/links.py _site", file=sys.stderr)
        return 2
    pages_of = links(Path(arguments[0]))
    with ThreadPoolExecutor(max_workers=8) as pool:
        answers = dict(zip(pages_of, pool.map(ask, pages_of), strict=True))
    for link, answer in answers.items():
        if answer:
            kind, text = answer
            print(f"{kind}: {link}: {text} (in {', '.join(sorted(pages_of[link]))})")
    errors = sum(kind == "error" for kind, _ in filter(None, answers.values()))
    print(f"{errors} of {len(answers)} links are broken")
    return 1 if errors else 0


def links(site: Path) -> dict[str, set[str]]:
    """Every address outside of the site and its repository, and the pages that link to it."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted(site.rglob("*.html")):
        for link in external(path.read_text(encoding="utf-8")):
            if not OWN.match(link):
                found[link].add(path.relative_to(site).as_posix())
    return found


def external(html: str) -> Iterator[str]:
    for match in re.finditer(r'<a\b[^>]*\shref="(https?://[^"]+)"', html):
        yield urldefrag(unescape(match[1])).url


def ask(link: str) -> tuple[str, str] | None:
    """None if the page is there, else ("error" or "unsure", why)."""
    why = ""
    for attempt in range(TRIES):
        time.sleep(2 * attempt)
        request = urllib.request.Request(link, headers={"User-Agent": AGENT})
        try:
            with urllib.request.urlopen(request, timeout=SECONDS):
                return None
        except urllib.error.HTTPError as error:
            if error.code in TURNED_AWAY:
                return "unsure", f"it answers {error.code} to programs"
            if error.code < 500:
                return "error", f"it answers {error.code}"
            why = f"it answers {error.code}"
        except (urllib.error.URLError, TimeoutError, OSError) as error:
            why = str(getattr(error, "reason", error))
    return "error", f"{why}, {TRIES} times"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
