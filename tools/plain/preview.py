"""Serves the plain build, renders the pages that a change concerns, and reloads the browser.

python tools/plain/preview.py SOURCE OUTPUT PORT
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath

import build

# What every page is made with; a change of anything else concerns the pages that name it.
EVERYWHERE = (".lua", ".yml", ".bib", ".csl", ".html", ".cff")
UNWATCHED = ("_site", "_preview", "tests", "__pycache__")
RELOAD = """\
let shown;
setInterval(async () => {
  const answer = await fetch("/.version").catch(() => ({}));
  const version = answer.ok ? await answer.text() : shown;
  if (shown && version !== shown) location.reload();
  shown = version;
}, 400);
"""


class Handler(SimpleHTTPRequestHandler):
    def end_headers(self) -> None:
        self.send_header("Cache-Control", "no-store")
        super().end_headers()

    def log_message(self, *_: object) -> None:
        pass


def preview(source: Path, output: Path, port: int) -> None:
    """Build the whole book, then what changes, until Ctrl+C."""
    handler = functools.partial(Handler, directory=str(output))
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    before = snapshot(source)
    rendered = show([], [], source, output)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"site: http://127.0.0.1:{server.server_port} (Ctrl+C ends the preview)", flush=True)
    while True:
        time.sleep(0.3)
        now = snapshot(source)
        changed = [name for name in now.keys() | before.keys() if now.get(name) != before.get(name)]
        before = now
        try:
            rendered = show(rendered, changed, source, output) if changed else rendered
        except build.BuildError as error:
            print(f"error: {error}", flush=True)


def show(
    rendered: list[build.Rendered], changed: list[str], source: Path, output: Path
) -> list[build.Rendered]:
    """Render what the changes concern, and have the open pages reload themselves."""
    rendered = render_again(rendered, changed, source)
    build.write_site(rendered, source, output)
    for entry in rendered:
        with (output / entry.page.url).open("a", encoding="utf-8") as page:
            page.write('<script src="/reload.js"></script>\n')
    (output / "reload.js").write_text(RELOAD)
    (output / ".version").write_text(str(time.time_ns()))
    return rendered


def snapshot(source: Path) -> dict[str, float]:
    """When each file of the book was last changed."""
    found = {}
    for top in source.iterdir():
        if top.name.startswith(".") or top.name in UNWATCHED:
            continue
        for path in top.rglob("*") if top.is_dir() else [top]:
            if path.is_file() and "__pycache__" not in path.parts:
                found[path.relative_to(source).as_posix()] = path.stat().st_mtime
    return found


def render_again(
    rendered: list[build.Rendered], changed: list[str], source: Path
) -> list[build.Rendered]:
    config = build.read_config(source)
    pages = build.all_pages(config, source)
    known = {entry.page: entry for entry in rendered}
    wanted = [page for page in pages if page not in known or concerns(page, changed, source)]
    known.update((entry.page, entry) for entry in build.render_pages(wanted, config, source))
    return [known[page] for page in pages]


def concerns(page: build.Page, changed: list[str], source: Path) -> bool:
    """Whether a page is one of the changed files or quotes one of them."""
    text = (source / page.source).read_text(encoding="utf-8")
    files = [name for name in changed if not name.endswith(".qmd")]
    quoted = [*files, *map(called, files)]
    everywhere = any(name.endswith(EVERYWHERE) for name in changed)
    return page.source in changed or everywhere or any(name in text for name in quoted)


def called(name: str) -> str:
    """What pages also call a file: ``src/miniddp/ring.py`` is ``miniddp.ring``, a run its name."""
    path = PurePosixPath(name)
    if path.parts[0] == "src":
        return ".".join(path.with_suffix("").parts[1:]).removesuffix(".__init__")
    if path.parts[0] in ("runs", "recordings"):
        return f'"{path.name.partition(".")[0]}"'
    return name


if __name__ == "__main__":
    try:
        preview(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve(), int(sys.argv[3]))
    except (build.BuildError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
