"""Whatever is wrong stops the build with one line: page, line, element, what was looked for."""

from __future__ import annotations

import json

import pytest

PAGE = "chapters/05-ring.qmd"
BEFORE = "# The ring\n\nSome text.\n\n"
LINE = BEFORE.count("\n") + 1

SYMBOLS = (
    "SEGMENT_BYTES, TABLE, TOTAL, split, all_reduce, wait, Empty, send, Ring, Ring.size, "
    "Ring.names, Ring.__init__, Ring.next, Ring.step, Ring.Link, Ring.Link.cut, Ring.last, twice"
)


def code(attributes: str, *annotations: str) -> str:
    return "\n".join([f"::: {{.code {attributes}}}", *annotations, ":::"])


def run(attributes: str, caption: str = "") -> str:
    return f"::: {{.run {attributes}}}\n{caption}\n:::"


def diagram(attributes: str, caption: str = "") -> str:
    return f"::: {{.diagram {attributes}}}\n{caption}\n:::"


def interactive(attributes: str, caption: str = "") -> str:
    return f"::: {{.interactive {attributes}}}\n{caption}\n:::"


def measured(attributes: str, caption: str = "") -> str:
    return f"::: {{.measured {attributes}}}\n{caption}\n:::"


def diff(attributes: str, *annotations: str) -> str:
    return "\n".join([f"::: {{.diff {attributes}}}", *annotations, ":::"])


SPLIT = 'symbol="miniddp.ring:split"'
STAGES = 'from="stages/1_one.py" to="stages/2_two.py"'
REDUCE = 'symbol="miniddp.ring:all_reduce"'

FAILURES = {
    "unknown symbol": (
        code('symbol="miniddp.ring:all_reduc"'),
        '.code symbol="miniddp.ring:all_reduc": no such symbol in src/miniddp/ring.py '
        f"(it has: {SYMBOLS})",
    ),
    "symbol inside a string": (
        code('symbol="miniddp.ring:decoy"'),
        f'.code symbol="miniddp.ring:decoy": no such symbol in src/miniddp/ring.py '
        f"(it has: {SYMBOLS})",
    ),
    "ambiguous symbol": (
        code('symbol="miniddp.ring:twice"'),
        '.code symbol="miniddp.ring:twice": defined more than once (lines 136, 141) in '
        f"src/miniddp/ring.py (it has: {SYMBOLS})",
    ),
    "unknown module": (
        code('symbol="miniddp.rong:split"'),
        '.code symbol="miniddp.rong:split": no such module: there is no src/miniddp/rong.py',
    ),
    "malformed symbol": (
        code('symbol="miniddp.ring"'),
        '.code symbol="miniddp.ring": expected symbol="package.module:name" or file="path"',
    ),
    "no symbol": (code(""), '.code: expected symbol="package.module:name" or file="path"'),
    "unknown file": (
        code('file="exercises/06.py"'),
        '.code file="exercises/06.py": no such file: exercises/06.py',
    ),
    "annotation of a line that is gone": (
        code(SPLIT, "`sise = 1`", ": A note."),
        f".code {SPLIT}: no line `sise = 1` in the quoted part of src/miniddp/ring.py",
        LINE + 1,
    ),
    "annotation of a part of a line": (
        code(SPLIT, "`size = len(tensor)`", ": A note."),
        f".code {SPLIT}: no line `size = len(tensor)` in the quoted part of src/miniddp/ring.py",
        LINE + 1,
    ),
    "annotation of two lines": (
        code(REDUCE, "`def split(part):`", ": One.", "", "`send(tensor)`", ": Which?"),
        f".code {REDUCE}: 2 lines read `send(tensor)`: put the line above it in front, as in "
        "`line above` `send(tensor)`",
        LINE + 4,
    ),
    "annotation of a line that the docstring took along": (
        code(SPLIT + ' docstring="no"', "`Returns a list.`", ": A note."),
        f".code {SPLIT}: no line `Returns a list.` in the quoted part of src/miniddp/ring.py",
        LINE + 1,
    ),
    "two annotations of a line": (
        code(SPLIT, '`"""`', ": One.", "", '`"""`', ": Two."),
        f'.code {SPLIT}: `"""` is annotated twice',
        LINE + 1,
    ),
    "annotation without backticks": (
        code(SPLIT, "the size", ": A note."),
        f".code {SPLIT}: the annotated line must be inline code, in backticks: the size",
        LINE + 1,
    ),
    "annotation of two paragraphs": (
        code(SPLIT, '`"""`', "", ": One.", "", "    Two."),
        f'.code {SPLIT}: the annotation of `"""` must be one paragraph',
        LINE + 1,
    ),
    "annotation that is a list": (
        code(SPLIT, '`"""`', ": @eq-mean. The mean."),
        f'.code {SPLIT}: the annotation of `"""` must be one paragraph',
        LINE + 1,
    ),
    "text in a quote": (
        code(SPLIT, "Some text."),
        f".code {SPLIT}: it may hold nothing but a definition list of annotations",
    ),
    "unknown member": (
        code('symbol="miniddp.ring:Ring" members="next nxt"'),
        '.code symbol="miniddp.ring:Ring": no member nxt in src/miniddp/ring.py '
        f"(it has: {SYMBOLS})",
    ),
    "members of a function": (
        code(f'{SPLIT} members="next"'),
        f".code {SPLIT}: members of what is no class in src/miniddp/ring.py (it has: {SYMBOLS})",
    ),
    "annotation of a member that is left out": (
        code('symbol="miniddp.ring:Ring" members="next"', "`self.step = step`", ": A note."),
        '.code symbol="miniddp.ring:Ring": no line `self.step = step` in the quoted part of '
        "src/miniddp/ring.py",
        LINE + 1,
    ),
    "diff of one file": (
        diff('to="stages/2_two.py"'),
        '.diff to="stages/2_two.py": expected from="path" and to="path"',
    ),
    "diff with an unknown file": (
        diff('from="stages/1_one.py" to="stages/3_three.py"'),
        '.diff from="stages/1_one.py" to="stages/3_three.py": no such file: stages/3_three.py',
    ),
    "diff of equal files": (
        diff('from="stages/1_one.py" to="stages/1_one.py"'),
        '.diff from="stages/1_one.py" to="stages/1_one.py": the files do not differ',
    ),
    "diff of a part that does not change": (
        diff(f'{STAGES} symbol="end same"'),
        f'.diff symbol="end same" {STAGES}: no change in same '
        "(there is one in: top-of-the-file, imports, start, Loop, end, end-of-the-file)",
    ),
    "annotation of a line that does not change that way": (
        diff(STAGES, "`- import functools`", ": A note."),
        f".diff {STAGES}: no line `- import functools` in what changes from stages/1_one.py to "
        "stages/2_two.py",
        LINE + 1,
    ),
    "annotation of a line that the diff leaves out": (
        diff(STAGES, "`self.fifth = 5`", ": A note."),
        f".diff {STAGES}: no line `self.fifth = 5` in what changes from stages/1_one.py to "
        "stages/2_two.py",
        LINE + 1,
    ),
    "unknown run": (
        run('name="07-no" cell="hello"'),
        '.run name="07-no" cell="hello": no such run: there is no runs/07-no.py '
        "(there are: 01-demo, 02-cpu, 03-missing)",
    ),
    "run that is not recorded": (
        run('name="03-missing" cell="hello"'),
        '.run name="03-missing" cell="hello": no recording recordings/03-missing.cpu.ipynb '
        "(make it with: make record RUN=03-missing)",
    ),
    "run that is not recorded on a GPU": (
        run('name="02-cpu" cell="hello" kind="gpu"'),
        '.run name="02-cpu" cell="hello": no recording recordings/02-cpu.gpu.ipynb '
        "(make it with: make record RUN=02-cpu)",
    ),
    "unknown kind": (
        run('name="02-cpu" cell="hello" kind="tpu"'),
        '.run name="02-cpu" cell="hello": kind must be "gpu" or "cpu"',
    ),
    "no run": (run('cell="hello"'), '.run cell="hello": no run is named'),
    "no cell": (run('name="02-cpu"'), '.run name="02-cpu": no cell is named'),
    "unknown cell": (
        run('name="02-cpu" cell="helo"'),
        '.run name="02-cpu" cell="helo": no such cell in the recording (it has: hello)',
    ),
    "cell without output": (
        run('name="01-demo" cell="silent" kind="cpu"'),
        '.run name="01-demo" cell="silent": the cell has no output in recordings/01-demo.cpu.ipynb',
    ),
    "figure without alternative text": (
        run('name="01-demo" cell="figure"'),
        '.run name="01-demo" cell="figure": its output is a figure: say what it shows with '
        'fig-alt="…"',
    ),
    "empty alternative text": (
        run('name="01-demo" cell="figure" fig-alt=""'),
        '.run name="01-demo" cell="figure": its output is a figure: say what it shows with '
        'fig-alt="…"',
    ),
    "named figure without caption": (
        run('name="01-demo" cell="table" #tbl-one'),
        '.run name="01-demo" cell="table": a figure with a name needs a caption: write it inside',
    ),
    "caption of two paragraphs": (
        run('name="01-demo" cell="table" #tbl-one', "One.\n\nTwo."),
        '.run name="01-demo" cell="table": the caption must be one paragraph',
    ),
    "unknown value": (
        'Text []{.val run="01-demo" key="speed"}.',
        '.val run="01-demo" key="speed": no such value is recorded '
        "(there are: bandwidth, bytes, extra, name, newer, ranks, ratio)",
    ),
    "no key": (
        'Text []{.val run="02-cpu"}.',
        '.val run="02-cpu": no such value is recorded (there are: )',
    ),
    "format of another type": (
        '[]{.val run="01-demo" key="ratio" format="%d"}',
        '.val run="01-demo" key="ratio": format="%d" does not fit the value 0.5',
    ),
    "format without a place for the value": (
        '[]{.val run="01-demo" key="ratio" format="half"}',
        '.val run="01-demo" key="ratio": format="half" does not fit the value 0.5',
    ),
    "unknown term": (
        'A [ring]{.term key="zygote"}.',
        '.term key="zygote": no term "zygote" in appendix/glossary.qmd '
        "(it has: alpha–beta model, bucket, rank, ring all-reduce)",
    ),
    "no diagram": (diagram(""), '.diagram: expected src="vis/NAME.svg"'),
    "unknown diagram": (
        diagram('src="vis/rong.svg"'),
        '.diagram src="vis/rong.svg": no such file: vis/rong.svg',
    ),
    "diagram of another type": (
        diagram('src="src/miniddp/ring.py"'),
        '.diagram src="src/miniddp/ring.py": src/miniddp/ring.py is not an .svg file',
    ),
    "diagram that is no SVG": (
        diagram('src="vis/text.svg"'),
        '.diagram src="vis/text.svg": vis/text.svg has no <title id="text-title">',
    ),
    "diagram without title": (
        diagram('src="vis/notitle.svg"'),
        '.diagram src="vis/notitle.svg": vis/notitle.svg has no <title id="notitle-title">',
    ),
    "diagram without description": (
        diagram('src="vis/nodesc.svg"'),
        '.diagram src="vis/nodesc.svg": vis/nodesc.svg has no <desc id="nodesc-desc">',
    ),
    "diagram without viewBox": (
        diagram('src="vis/noviewbox.svg"'),
        '.diagram src="vis/noviewbox.svg": vis/noviewbox.svg has no viewBox',
    ),
    "named diagram without caption": (
        diagram('src="vis/ring.svg" #fig-ring'),
        '.diagram src="vis/ring.svg": a figure with a name needs a caption: write it inside',
    ),
    "diagram twice on a page": (
        diagram('src="vis/ring.svg"') + "\n\n" + diagram('src="vis/ring.svg"'),
        '.diagram src="vis/ring.svg": this diagram is on the page already: refer to it instead',
        LINE + 4,
    ),
    "no script": (interactive(""), '.interactive: expected src="vis/NAME.js"'),
    "unknown script": (
        interactive('src="vis/stil.js"'),
        '.interactive src="vis/stil.js": no such file: vis/stil.js',
    ),
    "script of another type": (
        interactive('src="vis/still.svg"'),
        '.interactive src="vis/still.svg": vis/still.svg is not a .js file',
    ),
    "script without a still": (
        interactive('src="vis/line.js"'),
        '.interactive src="vis/line.js": no such file: vis/line.svg',
    ),
    "named script without caption": (
        interactive('src="vis/still.js" #fig-still'),
        '.interactive src="vis/still.js": a figure with a name needs a caption: write it inside',
    ),
    "still twice on a page": (
        interactive('src="vis/still.js"', "One.") + "\n\n" + diagram('src="vis/still.svg"', "Two."),
        '.diagram src="vis/still.svg": this diagram is on the page already: refer to it instead',
        LINE + 4,
    ),
    "script with a run, but no cell": (
        interactive('src="vis/line.js" run="04-line"'),
        '.interactive run="04-line" src="vis/line.js": no cell is named',
    ),
    "script with an unknown cell": (
        interactive('src="vis/line.js" run="04-line" cell="time" kind="gpu"'),
        '.interactive cell="time" run="04-line" src="vis/line.js": '
        "no such cell in the recording (it has: timeline)",
    ),
    "timeline without alternative text": (
        interactive('src="vis/line.js" run="04-line" cell="timeline"'),
        '.interactive cell="timeline" run="04-line" src="vis/line.js": '
        'its output is a timeline: say what it shows with fig-alt="…"',
    ),
    "timeline without a picture": (
        interactive('src="vis/line.js" run="05-wrong" cell="empty" fig-alt="None."'),
        '.interactive cell="empty" run="05-wrong" src="vis/line.js": its figure is not an SVG',
    ),
    "cell without anything for a script": (
        interactive('src="vis/still.js" run="05-wrong" cell="silent"'),
        '.interactive cell="silent" run="05-wrong" src="vis/still.js": '
        "the cell has no timeline in recordings/05-wrong.cpu.ipynb",
    ),
    "no table": (measured('where="gpus=8"'), '.measured: expected table="name"'),
    "unknown table": (
        measured('table="rong"'),
        '.measured table="rong": no such table: there is no measurements/rong.csv '
        "(there are: copied, ring)",
    ),
    "unknown column": (
        measured('table="ring" columns="gpus time_us"'),
        '.measured table="ring": no column time_us (there are: link, gpus, size_bytes, rate)',
    ),
    "condition on an unknown column": (
        measured('table="ring" where="nodes=2"'),
        '.measured table="ring": no column nodes (there are: link, gpus, size_bytes, rate)',
    ),
    "condition that is none": (
        measured('table="ring" where="gpus is 8"'),
        '.measured table="ring": where: expected column=value or column>=number, not gpus is 8',
    ),
    "no such row": (
        measured('table="ring" where="gpus=8; link=slow"'),
        '.measured table="ring": no row where="gpus=8; link=slow"',
    ),
    "figure of a measurement without alternative text": (
        measured('table="ring" x="size_bytes" y="rate"'),
        '.measured table="ring": it is a figure: say what it shows with fig-alt="…"',
    ),
    "figure of one value": (
        measured('table="ring" x="gpus" y="rate" where="gpus=8" fig-alt="A point."'),
        '.measured table="ring": a figure needs numbers at two values of gpus',
    ),
    "measured value that is not there": (
        '[]{.val table="ring" where="gpus=4" column="rate"}',
        '.val table="ring": no row where="gpus=4"',
    ),
    "measured value of two rows": (
        '[]{.val table="ring" where="gpus=8" column="rate"}',
        '.val table="ring": 3 rows where="gpus=8": expected one',
    ),
    "measured value of no column": (
        '[]{.val table="ring" where="size_bytes=33554433"}',
        '.val table="ring": expected column="name"',
    ),
    "measured value that was not published": (
        '[]{.val table="ring" where="size_bytes=33554433" column="rate"}',
        '.val table="ring": the source gives no such value: the cell is empty',
    ),
    "measured text with a format": (
        '[]{.val table="ring" where="size_bytes=33554433" column="link" format="%d"}',
        '.val table="ring": format="%d" does not fit the value slow',
    ),
    "notebook of an unknown run": (
        '::: {.notebook name="9-no"}\n:::',
        '.notebook name="9-no": no such run: there is no runs/9-no.py '
        "(there are: 01-demo, 02-cpu, 03-missing)",
    ),
    "a div that Pandoc does not understand": (
        '::: {.takeaways title="a "b" c"}\n:::',
        "this line opens or closes no div: check the attributes and the quotes: ::: {.takeaways",
    ),
    "notebook without a name": ("::: {.notebook}\n:::", ".notebook: no run is named"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_failure(render, failure):
    text, message, *line = FAILURES[failure]
    done = render(PAGE, BEFORE + text + "\n")
    assert done.stdout == ""
    assert done.stderr == f"{PAGE}:{line[0] if line else LINE}: {message}\n"
    assert done.returncode == 1


def cell_showing(data: dict[str, str]) -> dict[str, object]:
    output = {"output_type": "display_data", "data": data}
    return {"metadata": {"name": "a"}, "outputs": [output]}


RECORDINGS = {
    "not JSON": ('{"cells": [', "{} is not a notebook"),
    "not an object": ("3", "{} is not a notebook"),
    "not a notebook": ('{"nothing": 1}', "{} is not a notebook"),
    "not a recording": (
        '{"cells": [], "metadata": {}}',
        "{} is not a recording: its metadata has no `miniddp` (make one with: "
        "make record RUN=03-missing)",
    ),
    "two cells of a name": (
        {"cells": [{"metadata": {"name": "a"}}, {"metadata": {"name": "a"}}]},
        "two cells of {} are named a",
    ),
    "an output that no page can show": (
        {"cells": [cell_showing({"text/html": "<b>no</b>"})]},
        "one of its outputs has no form that a page can show",
    ),
    "a figure that is no SVG": (
        {"cells": [cell_showing({"image/svg+xml": "<b>no</b>"})]},
        "its figure is not an SVG",
    ),
    "a figure without viewBox": (
        {"cells": [cell_showing({"image/svg+xml": '<svg width="1"></svg>'})]},
        "its figure has no viewBox",
    ),
}


@pytest.mark.parametrize("recording", RECORDINGS)
def test_bad_recording(render, book, recording):
    content, message = RECORDINGS[recording]
    path = "recordings/03-missing.cpu.ipynb"
    if isinstance(content, dict):
        content = json.dumps({**content, "metadata": {"miniddp": {"kind": "cpu"}}})
    (book / path).write_text(content, encoding="utf-8")
    done = render(PAGE, BEFORE + run('name="03-missing" cell="a" fig-alt="Nothing"'))
    label = '.run name="03-missing" cell="a"'
    assert done.stderr == f"{PAGE}:{LINE}: {label}: {message.format(path)}\n"
    assert done.returncode == 1


MEASUREMENTS = {
    "a table without source": (
        ("[ring]", "[rung]"),
        "measurements/sources.toml has no [ring]",
    ),
    "a source without address": (
        ('address = "https://example.org/ring"', ""),
        "[ring] of measurements/sources.toml has no address",
    ),
    "a column that is not explained": (
        ("rate = ", "rat = "),
        "[columns] of measurements/sources.toml has no rate",
    ),
    "a column without unit": (
        (" (GPUs)", ""),
        "measurements/ring.csv: gpus has no unit in measurements/sources.toml",
    ),
}


@pytest.mark.parametrize("case", MEASUREMENTS)
def test_bad_measurement(render, book, case):
    (old, new), message = MEASUREMENTS[case]
    sources = book / "measurements/sources.toml"
    text = sources.read_text(encoding="utf-8")
    assert old in text
    sources.write_text(text.replace(old, new, 1), encoding="utf-8")
    done = render(PAGE, BEFORE + measured('table="ring"'))
    assert done.stderr == f'{PAGE}:{LINE}: .measured table="ring": {message}\n'
    assert done.returncode == 1


def test_no_sources(render, book):
    (book / "measurements/sources.toml").unlink()
    done = render(PAGE, BEFORE + measured('table="ring"'))
    message = "there is no measurements/sources.toml"
    assert done.stderr == f'{PAGE}:{LINE}: .measured table="ring": {message}\n'


def test_the_second_of_two_alike_is_located(render):
    good = code(SPLIT)
    bad = code(SPLIT, "`gone`", ": A note.")
    done = render(PAGE, f"{BEFORE}{good}\n\n{bad}\n")
    assert done.stderr.startswith(f"{PAGE}:{LINE + 4}: ")


def test_attributes_over_two_lines_are_located(render):
    done = render(PAGE, BEFORE + 'One\n[]{.val run="01-demo"\nkey="speed"}\n')
    assert done.stderr.startswith(f"{PAGE}:{LINE + 1}: ")


def test_an_error_in_a_definition_is_the_glossary_s(render, book):
    glossary = book / "appendix/glossary.qmd"
    glossary.write_text('rank\n: One of []{.val run="01-demo" key="none"}.\n', encoding="utf-8")
    done = render(PAGE, "[rank]{.term}\n")
    assert done.stderr.startswith('appendix/glossary.qmd:2: .val run="01-demo" key="none": ')


def test_no_glossary(render, book):
    (book / "appendix/glossary.qmd").unlink()
    done = render(PAGE, BEFORE + "[rank]{.term}\n")
    assert done.stderr == f"{PAGE}:{LINE}: .term [rank]: there is no appendix/glossary.qmd\n"


def test_two_entries_of_a_name(render):
    page = "appendix/glossary.qmd"
    done = render(page, "Rank\n: One.\n\nrank\n: Two.\n")
    assert done.stderr == f"{page}: two entries have the name #term-rank\n"


@pytest.mark.parametrize(
    ("header", "where"),
    [("---\nbibliography: references.bib\n---\n\n", "references.bib"), ("", "no bibliography")],
)
def test_a_citation_of_nothing(render, book, header, where):
    (book / "references.bib").write_text("@misc{li2020, title={DDP}}\n", encoding="utf-8")
    done = render(PAGE, f"{header}{BEFORE}See @fig-a [@li2021, section 5].\n")
    line = header.count("\n") + LINE
    assert done.stderr == f"{PAGE}:{line}: @li2021: no such entry in {where}\n"
    assert done.returncode == 1


def test_no_runs(render, book):
    for path in (book / "runs").glob("*"):
        path.unlink()
    done = render(PAGE, BEFORE + "::: {.recordings}\n:::\n")
    message = ".recordings: there are no runs: no file runs/NN-name.py"
    assert done.stderr == f"{PAGE}:{LINE}: {message}\n"
