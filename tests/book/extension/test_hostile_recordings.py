"""What a recording or a picture might bring into a page, were it taken as it is."""

from __future__ import annotations

import json
import re

import pytest

PICTURES = {
    "a script": "<script>steal()</script>",
    "a handler": '<rect width="1" height="1" onclick="steal()"/>',
    "a handler on a line of its own": '<rect width="1"\nONLOAD = "steal()"/>',
    "a link that runs": '<a href="javascript:steal()"><text>here</text></a>',
    "a link elsewhere": '<a xlink:href="https://example.org"><text>here</text></a>',
    "another page": "<foreignObject><iframe/></foreignObject>",
    "an attribute set later": '<set attributeName="href" to="javascript:steal()"/>',
    "a picture from elsewhere": '<image href="//example.org/x.png"/>',
    "a style from elsewhere": "<style>@import 'https://example.org/x.css';</style>",
    "a pattern from elsewhere": '<rect fill="url( https://example.org/x#y)"/>',
}
TEXTS = {
    "a link that runs": "[here](javascript:steal())",
    "a link that runs, in disguise": "[here](<JavaScript:steal()>)",
    "a link that is a page": "[here](data:text/html,<script>steal()</script>)",
    "a picture": "![here](https://example.org/x.png)",
}
HTML = """\
<script>steal()</script> and <b onclick="steal()">text</b>

<div onclick="steal()">text</div>

::: {onclick="steal()"}
text
:::

[text]{onclick="steal()"}, `code`{onclick="steal()"}

`<script>steal()</script>`{=html}
"""


def take_in(book, mime: str, text: str, kind: str = "code") -> None:
    """Put a text into every recording of a run: as what a cell printed, or as a cell of text."""
    for path in book.glob("recordings/01-demo.*.ipynb"):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        shown = {"output_type": "display_data", "metadata": {}, "data": {mime: text}}
        cell = {"cell_type": kind, "id": "x", "source": "text", "metadata": {"name": "hostile"}}
        cell |= {"outputs": [shown], "execution_count": 1} if kind == "code" else {"source": text}
        notebook["cells"].append(cell)
        path.write_text(json.dumps(notebook), encoding="utf-8")


def shown(render, line: str):
    return render("chapters/05-x.qmd", f"# X\n\n::: {line}\n:::\n")


RUN = '{.run name="01-demo" cell="hostile" fig-alt="A figure."}'
NOTEBOOK = '{.notebook name="01-demo"}'


@pytest.mark.parametrize("inside", PICTURES.values(), ids=PICTURES)
def test_a_picture_draws_and_does_nothing_else(book, render, inside):
    take_in(book, "image/svg+xml", f'<svg viewBox="0 0 1 1" width="1">{inside}</svg>')
    done = shown(render, RUN)
    assert done.returncode == 1
    assert "its figure holds more than a picture: " in done.stderr


def test_what_pictures_need_stays(book, render):
    inside = (
        '<defs><clipPath id="c"><rect width="1" height="1"/></clipPath></defs>'
        '<image href="data:image/png;base64,AAAA"/><use xlink:href="#c" clip-path="url(#c)"/>'
        "<text>on = 1, href = 2</text>"
    )
    take_in(book, "image/svg+xml", f'<svg viewBox="0 0 1 1" width="1">{inside}</svg>')
    done = shown(render, RUN)
    assert done.returncode == 0, done.stderr
    assert inside in done.stdout


@pytest.mark.parametrize("line", [RUN, NOTEBOOK], ids=["output", "cell"])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_text_leads_to_the_web_at_most(book, render, line, text):
    take_in(book, "text/markdown", text, "code" if line == RUN else "markdown")
    done = shown(render, line)
    assert done.returncode == 1
    assert re.search("a text of it (links to|loads) ", done.stderr)


@pytest.mark.parametrize("line", [RUN, NOTEBOOK], ids=["output", "cell"])
def test_html_in_a_text_is_only_text(book, render, line):
    take_in(book, "text/markdown", HTML, "code" if line == RUN else "markdown")
    done = shown(render, line)
    assert done.returncode == 0, done.stderr
    assert "&lt;script&gt;steal()" in done.stdout
    assert not re.search(r"<script|<[^<>]*\sonclick", done.stdout)


def test_what_a_timeline_says_does_not_end_its_element(book, render):
    path = book / "recordings/04-line.cpu.ipynb"
    text = path.read_text(encoding="utf-8")
    hostile = text.replace(
        '"parameters"', '"</script><script>steal()</script>": 0, "parameters"', 1
    )
    path.write_text(hostile, encoding="utf-8")
    line = '{.interactive src="vis/line.js" run="04-line" cell="timeline" kind="cpu" fig-alt="L."}'
    done = shown(render, line)
    assert done.returncode == 0, done.stderr
    assert r"\u003c/script>" in done.stdout or r"\u003c\/script>" in done.stdout
    assert "<script>steal()" not in done.stdout
