"""Every quoted snippet, as its copy button gives it, runs in a fresh interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .pages import PAGES, QUOTE, ROOT, quotes, read

# What a reader has: the repository's tests, and what lies beside a run or a stage.
SEARCHED = [ROOT, ROOT / "runs", ROOT / "stages"]
QUOTING = [page for page in PAGES if QUOTE.search(read(page))]
Execute = Callable[[str], str | None]
PROGRAMS = "runs/questions/"
"""Whole programs of two ranks, which tests/book/test_questions.py runs as such."""


@pytest.fixture(scope="module")
def execute() -> Iterator[Execute]:
    """Executes a snippet; what is wrong with it, or None."""
    server = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("fresh.py"), *SEARCHED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert server.stdin
    assert server.stdout

    def execute(text: str) -> str | None:
        print(json.dumps(text), file=server.stdin, flush=True)
        return json.loads(server.stdout.readline())

    yield execute
    server.stdin.close()
    server.wait(60)


@pytest.mark.parametrize("page", QUOTING)
def test_every_quote_runs_as_it_is_copied(
    page: str, execute: Execute, executed: Counter[str]
) -> None:
    found = quotes(page)
    assert len(found) == len(QUOTE.findall(read(page)))
    for quote in found:
        assert quote.language == "python", (
            f"nothing executes the {quote.language} of {quote.source}"
        )
        if quote.source.startswith(PROGRAMS):
            continue
        wrong = execute(quote.text)
        assert not wrong, f"{page} quotes {quote.source}:\n\n{quote.text}\n\n{wrong}"
    executed["quoted snippets executed"] += len(found)


def test_a_copied_quote_has_no_marks() -> None:
    texts = [quote.text for quote in quotes("chapters/04-replicas.qmd")]
    assert not [text for text in texts if "# <" in text]
    assert "from miniddp.replicate import broadcast_coalesced" in "".join(texts)


@pytest.mark.parametrize(
    ("snippet", "wrong"),
    [
        ("import math\n\ndef root():\n    return math.sqrt(2)", None),
        ("def root():\n    return math.sqrt(2)", "undefined names: math"),
        ("class A:\n    def f(self):\n        return [x for _ in self]", "undefined names: x"),
        ("if __name__ == '__main__':\n    code = run()\n    print(code)", "undefined names: run"),
        ("miniddp.get('rank')", "NameError: name 'miniddp' is not defined"),
        ("from miniddp.ring import all_reduc", "cannot import name 'all_reduc'"),
        ("import os\nos._exit(3)", "the process ended with status 768"),
    ],
)
def test_what_does_not_run_is_noticed(execute: Execute, snippet: str, wrong: str | None) -> None:
    problem = execute(snippet)
    assert problem is None if wrong is None else wrong in (problem or "")
