"""What each construct of the extension becomes, beside the three pages of test_golden.py."""

from __future__ import annotations

import html
import re

import pytest

RANK = "One process of the group. Its number is called a rank, too."
CPU = "CPU recording · 2-core AMD EPYC · 2 and 4 ranks over gloo · torch 2.13.0 · 2026-11-21"
GPU = (
    "GPU recording · NVIDIA H100 80GB HBM3 · 2 and 4 ranks sharing 1 GPU over gloo · "
    "torch 2.13.0 · 2026-11-21"
)
STALE = "recorded before the latest change of this code"


@pytest.fixture
def page(render):
    """The HTML of one of the pages in `cases`."""

    def rendered(path: str) -> str:
        done = render(path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return rendered


def text(part: str) -> str:
    """What a reader reads of a part of a page."""
    return html.unescape(re.sub(r"<[^>]+>", "", part)).strip()


def rows(part: str) -> list[list[str]]:
    """The cells of each row of the tables in a part of a page."""
    found = re.findall(r"<tr>(.*?)</tr>", part, re.DOTALL)
    return [[text(cell) for cell in re.findall(r"<t[hd].*?</t[hd]>", row)] for row in found]


def test_terms(page):
    links = re.findall(
        r'<a href="(.*?)" class="term" data-tip="(.*?)">(.*?)</a>', page("chapters/05-term.qmd")
    )
    ring = "All-reduce along a ring: 1,234,567\u00a0bytes with send and N ranks."
    assert links == [
        ("../appendix/glossary.qmd#term-rank", RANK, "rank"),
        ("../appendix/glossary.qmd#term-rank", RANK, "Ranks"),
        ("../appendix/glossary.qmd#term-ring-all-reduce", ring, "<em>ring</em> all-reduce"),
        (
            "../appendix/glossary.qmd#term-bucket",
            "Gradients that travel together.",
            "which sends buckets",
        ),
    ]


def test_the_glossary(page):
    glossary = page("appendix/glossary.qmd")
    assert re.findall(r'<dt><span id="(.*?)">(.*?)</span></dt>', glossary) == [
        ("term-rank", "Rank"),
        ("term-ring-all-reduce", "ring all-reduce"),
        ("term-bucket", "bucket"),
        ("term-alpha-beta-model", "alpha–beta model"),
    ]
    assert f'<a href="#term-rank" class="term" data-tip="{RANK}">rank</a>' in glossary
    assert "A second paragraph" in glossary


def test_a_page_of_the_root(page):
    index = page("index.qmd")
    assert '<a href="appendix/glossary.qmd#term-rank" class="term"' in index
    assert '<a href="runs/02-cpu.qmd">CPU recording' in index
    assert "\nExercise\u00a01\n" in index


def test_recorded_values(page):
    values = page("chapters/05-val.qmd")
    assert text(values).splitlines()[-1] == (
        "GPU first: 12.3\u00a0GB/s; CPU: 1.234\u00a0GB/s. "
        "Thousands: 1,234,567, 1,234,567.0, 4; not: 1234567. A text: gloo. "
        "Around it: about 0.50×. Only the CPU recording has 1."
    )
    tips = re.findall(r'<span class="recorded" tabindex="0" data-tip="(.*?)">', values)
    on_gpu = f"01-demo: {GPU} · commit abc1234 · {STALE}"
    on_cpu = f"01-demo: {CPU} · commit abc1234"
    assert tips == [on_gpu, on_cpu, *[on_gpu] * 6, on_cpu]


def test_boxes(page):
    boxes = page("chapters/05-boxes.qmd")
    titles = re.findall(r'<div([^>]*)>\n<div class="box-title">\n(.*?)\n</div>', boxes)
    assert titles == [
        (' class="objectives"', "You will be able to"),
        (' id="exercise-1" class="exercise"', "Exercise\u00a05.1"),
        (' id="mine" class="exercise"', "Exercise\u00a05.2"),
        (' class="takeaways"', "Takeaways"),
        (' class="predict"', "What do you expect?"),
    ]
    assert '<div class="objectives">\n<p>You will be able to say what it does.</p>' in boxes
    folds = re.findall(
        r'<details class="answer"><summary>(.*?)</summary>\n<p>(.*?)</p>.*?</details>',
        boxes,
        re.DOTALL,
    )
    assert folds == [("Answer", "So many:"), ("See what happens", "Rank 3.")]


def test_diagrams(page):
    diagrams = page("chapters/05-diagram.qmd")
    svg = re.compile(r'<svg class="drawn" role="img" aria-labelledby="(.*?)".*? style="(.*?)">')
    assert svg.findall(diagrams) == [
        (f"{name}-title {name}-desc", "max-width: 320px; ") for name in ("ring", "still", "plain")
    ]
    assert re.findall(r"<(?:figure|div)[^>]*diagram[^>]*>", diagrams) == [
        '<figure id="fig-ring" class="diagram">',
        '<figure class="diagram">',
        '<div class="diagram">',
    ]
    assert [text(caption) for caption in re.findall("<figcaption>.*", diagrams)] == [
        "Two ranks.",
        "Without a number.",
    ]
    assert '<defs><marker id="ring-arrow"><path d="M0 0L4 2L0 4z"/></marker></defs>' in diagrams
    assert "<?xml" not in diagrams
    assert "drawn by hand" not in diagrams


DIFF = '''\
top of the file
Removed: - """Stage 1."""
Added: + """Stage 2."""
imports
Added: + import functools
Unchanged:   import os
start(), removed
Removed: - def start():
-     return os.getpid()
class Loop
Unchanged:   class Loop:
      def run(self):
Removed: -         self.first = 1
Added: +         self.first = "<1>"
Unchanged:           self.second = 2
          self.third = 3
… 4 unchanged lines
Unchanged:           self.eighth = 8
          self.ninth = 9
Removed: -         return self.first + self.second
Added: +         return self.second
+
+     def stop(self):
+         return None
end(), new
Added: + @functools.cache
+ def end():
+     return None
end of the file
Unchanged:   if __name__ == "__main__":
Removed: -     start()
Added: +     end()'''
FOLDED = """\
imports
Added: + import functools
Unchanged:   import os
end(), new
Added: + @functools.cache
+ def end():
+     return None"""


@pytest.fixture
def diffs(page) -> list[str]:
    """The three quotes of the page of diffs."""
    return re.split('(?=<div[^>]* class="code diff")', page("chapters/05-diff.qmd"))[1:]


def compared(diff: str) -> str:
    code = re.search('<code class="sourceCode python">(.*?)</code>', diff, re.DOTALL)[1]
    return "\n".join(line.rstrip() for line in text(code).splitlines())


def test_a_diff_shows_what_changes_by_function(diffs):
    assert compared(diffs[0]) == DIFF
    head = '<a href="https://example.org/fixture/blob/trunk/stages/2_two.py">stages/2_two.py</a>'
    assert f'{head}<span class="code-said">what changes from stages/1_one.py</span>' in diffs[0]
    assert 'data-before="&quot;&quot;&quot;Stage 2.&quot;&quot;&quot;\n\nimport f' in diffs[0]
    assert re.findall('</(del|ins|span)><span class="diff-place">start', diffs[0]) == ["span"]
    line = (
        '<del><span class="visually-hidden">Removed: </span><span class="diff-line" id="diff-1-1">'
        '<span class="diff-sign" aria-hidden="true">- </span><span class="co">'
        "&quot;&quot;&quot;Stage 1.&quot;&quot;&quot;</span>\n</span></del><ins>"
    )
    assert line in diffs[0]


def test_the_notes_of_a_diff_are_those_of_lines(diffs):
    notes = re.findall(
        r'<a href="#diff-1-(\d+)">(\d)<span.*?>: <code>(.*?)</code></span></a></dt><dd>(.*?)</dd>',
        diffs[0],
        re.DOTALL,
    )
    assert [(line, number, code, text(said).strip()) for line, number, code, said in notes] == [
        ("12", "1", "self.third = 3", "Stays."),
        ("15", "2", "- return self.first + self.second", "Goes."),
        ("18", "3", "+ def stop(self):", "Is new, for a rank."),
    ]
    assert re.findall(r'id="(diff-1-\d+)" data-note="(\d)"', diffs[0]) == [
        ("diff-1-12", "1"),
        ("diff-1-15", "2"),
        ("diff-1-18", "3"),
    ]


def test_a_diff_of_some_parts_and_one_without_the_docstring(diffs):
    _, folded, back = diffs
    assert folded.startswith('<div id="folded" class="code diff"')
    assert '<details class="folded"><summary>What is <code>new</code></summary>' in folded
    assert compared(folded) == FOLDED
    places = re.findall('<span class="diff-place">(.*)', back)
    assert places == ["imports", "start(), new", "class Loop", "end(), removed", "end of the file"]
    assert 'id="diff-3-1"' in back


def test_what_moves(page):
    moving = page("chapters/05-interactive.qmd")
    loads = re.findall(r'<link rel="stylesheet" href="(.*?)">|<script .*? src="(.*?)">', moving)
    assert ["".join(one) for one in loads] == [
        "../vis/interactive.css",
        "../vis/still.js",
        "../vis/line.css",
        "../vis/line.js",
    ]
    frames = moving.split('<div class="interactive-frame">')[1:]
    assert re.findall(r'<figure id="(.*?)" class="interactive">\n', moving) == [
        "fig-still",
        "fig-line",
        "fig-lines",
    ]
    stages = r'<div class="stage" data-module="(.*?)">\n<div class="still"><svg '
    assert re.findall(stages, moving) == ["still", "line", "line", "line"]
    assert moving.count("<noscript><p>With JavaScript you can change what this shows.</p>") == 4
    assert text(re.search("<figcaption>.*", frames[0])[0]) == "It moves with ranks."
    assert 'aria-label="Two &quot;buckets&quot; &amp; a wait."' in frames[1]
    assert '"step":2}</script>' in frames[1]
    assert r'"parameters":["\u003c/script>"]' in frames[1]
    tabs = frames[2].split("<h2>")
    assert [tab[:3] for tab in tabs[1:]] == ["GPU", "CPU"]
    assert tabs[0].endswith('<div class="panel-tabset">\n')
    assert '<div class="provenance gpu">\n' in tabs[1]
    assert '"end":4.2e-3' in tabs[1]
    assert '"end":1.05e-2' in tabs[2]


REFERENCE = """\
import gears gives you Link, turn.
gears.wheel
A rank is a wheel; each rank turns.
wheel.turn(1)
It is round: <2> & [more] of $3, ~~ not gone.

src/gears/wheel.py

TEETH
TEETH = 4 * 2**2
Of a wheel.
Link
@dataclass
class Link:
    alpha: float
    unit: str = "B/s"
A way from a to b.
Attributes:

alpha: seconds per message.
unit: of the other.

Link.name
@property
def name(self) -> str:
Its name.
Link.send
def send(self, *tensors: int, wait: bool = False) -> None:
Send.
"""
REFERENCE_END = """\
get
get = _Get()
    def __call__(self, name: str) -> int: ...
Which rank?
get.forget
def forget(self) -> None:
Ask again.
SlipError
class SlipError(Exception):
Nothing but a docstring.
turn
def turn(by):
Turn.
Arguments:

by: so many teeth.

Raises:

SlipError: it does.

Returns: The teeth that are left, if any."""


def test_a_reference(page):
    reference = page("chapters/05-reference.qmd")
    shown = text(reference.split("</div>", 1)[1])
    assert shown.startswith(REFERENCE)
    assert shown.endswith(REFERENCE_END)
    assert rows(reference) == [["case", "bytes"], ["all", "2"], ["none", "0"]]
    assert '<h5 id="api-gears-wheel-Link-send"><code>Link.send</code></h5>' in reference
    assert '<a href="#api-gears-wheel-Link"><code>Link</code></a>' in reference
    assert "It is <em>round</em>:" in reference
    assert '<pre class="signature"><code>def turn(by):</code></pre>' in reference
    source = '<a href="https://example.org/fixture/blob/trunk/src/gears/wheel.py">'
    assert f'<div class="api-source">\n{source}' in reference


def test_the_list_of_published_measurements(page):
    listed, copied, ring = re.split("<h2 id=", page("appendix/measurements.qmd"))
    assert rows(listed) == [
        ["Training, and parts of it", "Hardware"],
        ["A copy", "2 GPUs"],
        ["A ring of eight", "8 × GPU & switch"],
    ]
    assert '<a href="#copied">A copy</a>' in listed
    assert copied.startswith('"copied">A copy</h2>')
    assert dict(rows(copied))["Table"] == "copied.csv, 2 rows"
    assert rows(ring) == [
        ["Measured", "all-reduce"],
        ["Hardware", "8 × GPU & switch"],
        ["Software", "NCCL 2"],
        ["Date", "2026-01-02"],
        ["Authors", "Somebody, a book"],
        ["Caveat", "One run."],
        ["Table", "ring.csv, 6 rows"],
        ["Read", "original"],
        ["Commit", "abc"],
        ["Licence", "MIT"],
    ]
    assert '<a href="../measurements/ring.csv" download="ring.csv">' in ring
    assert '<a href="https://example.org/ring">Somebody, a book</a>' in ring
    fold = '<details class="folded"><summary>Where exactly</summary>\n<table class="facts">'
    assert ring.index("ring.csv") < ring.index(fold) < ring.index("original")


def test_the_list_of_runs(page):
    listed = page("appendix/runs.qmd")
    day = ["2.13.0", "2026-11-21"]
    gpu = "GPU, NVIDIA H100 80GB HBM3, older than the code"
    assert rows(listed) == [
        ["Run", "Recording", "Ranks", "torch", "Date", "Commit"],
        ["01-demo", gpu, "2 and 4 ranks sharing 1 GPU over gloo", *day, "abc1234"],
        ["01-demo", "CPU, 2-core AMD EPYC", "2 and 4 ranks over gloo", *day, "abc1234"],
        ["02-cpu", "CPU, 2-core AMD EPYC", "1 rank", *day, "feedfac with local changes"],
        ["03-missing", "not recorded", "", "", "", ""],
    ]
    links = re.findall('<th><a href="(.*?)">', listed)
    assert links == [f"../runs/{name}.qmd" for name in ("01-demo", "01-demo", "02-cpu")]


def test_the_page_of_a_run(page):
    notebook = page("runs/02-cpu.qmd")
    assert rows(notebook) == [
        ["Recording", "CPU"],
        ["Device", "2-core AMD EPYC"],
        ["Ranks", "1 rank"],
        ["Versions", "torch 2.13.0"],
        ["Data", "mrpc sample"],
        ["Date", "2026-11-21"],
        ["Commit", "feedfac with local changes"],
        ["Command", "make record RUN=02-cpu"],
        ["Duration", "31.2 s"],
        ["Code", "miniddp.ring:split, runs/02-cpu.py"],
    ]
    assert f'<a href="https://example.org/fixture/commit/{"feedface" * 5}">feedfac' in notebook
    file = "02-cpu.cpu.ipynb"
    link = f'<a href="../recordings/{file}" download="{file}">Download {file}</a>'
    assert f'<div class="download">\n{link}\n</div>' in notebook
    assert '<section id="cpu-only-one" class="unnumbered nb-markdown">' in notebook
    assert "panel-tabset" not in notebook
    cell = notebook[notebook.index('<div class="nb-cell">') :]
    assert '<div class="nb-in">\n<pre class="python"><code>print(&#39;hello&#39;)</code>' in cell
    assert '<div class="nb-out">\n<pre class="output"><code>hello</code></pre>' in cell


def test_the_page_of_a_run_on_two_kinds_of_machine(page):
    before, on_gpu, on_cpu = re.split("<h2>(?=GPU|CPU)", page("runs/01-demo.qmd"))
    assert before.endswith('<div class="panel-tabset">\n')
    assert dict(rows(on_gpu))["Recording"] == f"GPU, {STALE}"
    assert dict(rows(on_gpu))["Versions"] == "python 3.11.9, torch 2.13.0+cu130"
    assert dict(rows(on_cpu))["Backend"] == "gloo"
    assert '<h3 class="unnumbered" id="gpu-details">Details</h3>' in on_gpu
    assert '<h3 class="unnumbered" id="cpu-details">Details</h3>' in on_cpu
    cells = on_cpu.split('<div class="nb-cell">')[1:]
    assert len(cells) == 9
    assert [text(cell).splitlines()[0] for cell in cells] == [
        "print('hello')",
        "show_ranks(results)",
        "table(rows)",
        "figure(fig)",
        "record(bandwidth=1.234)",
        "print(1)",
        "x = 1",
        "print(2)",
        "record(newer=1)",
    ]
    assert 'aria-label="Time against size"' in cells[3]
    assert "nb-out" not in cells[6], "a cell without output"
