"""The same pages through Quarto: what the extension makes is treated as if an author wrote it."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

QUARTO = shutil.which("quarto")

pytestmark = pytest.mark.skipif(QUARTO is None, reason="no quarto on PATH or in .venv")

CONFIGURATION = """\
project:
  type: book
  resources: [recordings/*.ipynb, measurements/*.csv]
book:
  title: Fixture
  repo-url: https://example.org/fixture
  chapters: [index.qmd, {chapters}]
  appendices: [appendix/glossary.qmd, appendix/measurements.qmd, appendix/runs.qmd,
    runs/01-demo.qmd, runs/02-cpu.qmd, runs/04-line.qmd]
filters: [{at: pre-ast, path: _extensions/ddp-book/book.lua}]
format: {html: {code-annotations: false}}
"""


@pytest.fixture
def render_all(book):
    def run(*options):
        chapters = sorted(str(path.relative_to(book)) for path in book.glob("chapters/05-*.qmd"))
        configuration = CONFIGURATION.replace("{chapters}", ", ".join(chapters))
        (book / "_quarto.yml").write_text(configuration, encoding="utf-8")
        command = [QUARTO, "render", "--no-clean", *options]
        return subprocess.run(command, cwd=book, capture_output=True, encoding="utf-8", timeout=170)

    return run


def test_book(book, render_all):
    with (book / "chapters/05-term.qmd").open("a", encoding="utf-8") as page:
        page.write("\nSee @fig-ring, @fig-line and @tbl-times.\n")
    done = render_all()
    assert done.returncode == 0, done.stderr
    assert "Unable to resolve" not in done.stderr
    html = {path.stem: path.read_text(encoding="utf-8") for path in book.glob("_book/**/*.html")}

    code = html["05-code"]
    assert code.count(" data-note=") == 6
    assert not re.search(r"&lt;\d+&gt;", code)
    assert '<dd>A <a href="../appendix/glossary.html#term-rank"' in re.sub(r"<dd>\s*", "<dd>", code)
    assert html["05-diff"].count(" data-note=") == 3
    assert 'id="diff-1-18" data-note="3"' in html["05-diff"]

    run = html["05-run"]
    assert run.count('<ul class="nav nav-tabs"') == 2
    assert run.count('<a class="nav-link active"') == 2
    assert re.search(r"<figcaption [^>]*>\s*Figure&nbsp;\S+: Time against <em>size</em>", run)
    assert re.search(r"<figcaption [^>]*>\s*Table&nbsp;\S+: Times by ", run)
    assert 'href="../runs/01-demo.html">CPU recording' in run

    assert re.search(
        r'id="fig-ring".*?<svg class="drawn" role="img" aria-labelledby=', html["05-diagram"], re.S
    )
    for name, kind in [("fig-ring", "Figure"), ("fig-line", "Figure"), ("tbl-times", "Table")]:
        link = rf'<a href="[^"]*#{name}" class="quarto-xref">{kind}&nbsp;<span>'
        assert re.search(link, html["05-term"])
    assert 'id="term-ring-all-reduce"' in html["glossary"]
    assert "min read" in html["05-run"]
    assert "min read" not in html["index"]
    assert re.search(
        r"<figcaption [^>]*>\s*Figure&nbsp;\S+: Bandwidth by size", html["05-measured"]
    )
    assert 'href="../appendix/measurements.html#ring"' in html["05-measured"]
    assert 'id="ring"' in html["measurements"]
    assert (book / "_book/recordings/01-demo.gpu.ipynb").exists()
    assert (book / "_book/measurements/ring.csv").exists()
    for name, text in html.items():
        local = re.findall(r'href="(?!https?:)([^"]*\.qmd[^"]*)"', text)
        assert not local, name


def test_failure_names_the_page_and_the_line(book, render_all):
    with (book / "chapters/05-run.qmd").open("a", encoding="utf-8") as page:
        page.write('\n::: {.run name="01-demo" cell="nothing"}\n:::\n')
    line = (book / "chapters/05-run.qmd").read_text(encoding="utf-8").count("\n") - 1
    done = render_all()
    assert done.returncode != 0
    wanted = f'chapters/05-run.qmd:{line}: .run name="01-demo" cell="nothing": no such cell'
    assert any(text.startswith(wanted) for text in done.stderr.splitlines())


def test_another_format_says_what_makes_it(book, render_all):
    done = render_all("--to", "epub")
    assert done.returncode != 0
    assert "epub: `make downloads` makes the EPUB and the PDF" in done.stderr
