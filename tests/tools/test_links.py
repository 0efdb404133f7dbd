"""tools/links.py against a small server of this machine."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import links


class Handler(http.server.BaseHTTPRequestHandler):
    failures = 0

    def do_GET(self) -> None:
        codes = {"/there": 200, "/gone": 404, "/shy": 403, "/broken": 500}
        code = codes.get(self.path, 200)
        if self.path == "/flaky" and Handler.failures < 2:
            Handler.failures += 1
            code = 502
        self.send_response(code)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(links.time, "sleep", lambda _: None)
    Handler.failures = 0
    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}"
    running.shutdown()
    running.server_close()


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/there", None),
        ("/flaky", None),
        ("/gone", ("error", "it answers 404")),
        ("/shy", ("unsure", "it answers 403 to programs")),
        ("/broken", ("error", "it answers 500, 3 times")),
    ],
)
def test_answers(server: str, path: str, answer: tuple[str, str] | None) -> None:
    assert links.ask(server + path) == answer


def test_a_server_that_is_not_there(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links.time, "sleep", lambda _: None)
    kind, why = links.ask("http://127.0.0.1:9/") or ("", "")
    assert kind == "error"
    assert why.endswith("3 times")


def test_a_site_with_a_broken_link(server: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "index.html").write_text(
        f'<a class="x" href="{server}/there#part">a</a><a href="runs/a.html">b</a>'
        f'<a href="{server}/gone?a=1&amp;b=2">c</a><a href="https://ddp-from-scratch.github.io/x">'
    )
    (tmp_path / "runs/a.html").write_text(f'<a href="{server}/shy">d</a>')
    assert links.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"unsure: {server}/shy: it answers 403 to programs (in runs/a.html)",
        "0 of 3 links are broken",
    ]
    (tmp_path / "runs/b.html").write_text(f'<a href="{server}/gone">d</a>')
    assert links.main([str(tmp_path)]) == 1
    assert f"error: {server}/gone: it answers 404 (in runs/b.html)" in capsys.readouterr().out


def test_no_site_is_one_line(tmp_path: Path, capsys) -> None:
    assert links.main([str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.startswith("links.py: say where the site is")
