"""What depends on the page, the repository and the recording's provenance."""

from __future__ import annotations

import json
import re

import pytest

PAGE = "chapters/05-ring.qmd"


def badge(html: str) -> str:
    return re.search(r'<div class="provenance[^>]*>\s*<a [^>]*>(.*?)</a>', html)[1]


LISTING = '::: {.code symbol="miniddp.ring:split"}\n:::\n'


def reading_time(html: str) -> str:
    return re.search(r'<div class="reading-time">\s*<span [^>]*>(.*?)</span>', html)[1]


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("", "1 min read: 0 words"),
        ("word", "1 min read: 1 word"),
        ("word " * 200, "1 min read: 200 words"),
        ("word " * 1001, "6 min read: 1,001 words"),
        ("word\n\n```python\none\n\ntwo\n```\n", "1 min read: 1 word, 2 lines of code"),
        ("word\n\n```bash\n" + "make\n" * 21 + "```\n", "2 min read: 1 word, 21 lines of code"),
        ("word " * 400 + f"\n\n{LISTING}", "3 min read: 400 words, 6 lines of code"),
        (LISTING.replace('"}', '" fold="More"}'), "1 min read: 0 words"),
        (f"::: {{.answer}}\n{LISTING}:::\n", "1 min read: 0 words"),
        ('::: {.run name="02-cpu" cell="hello"}\n:::\n', "1 min read: 0 words"),
        (
            '::: {.diff from="stages/1_one.py" to="stages/2_two.py" symbol="end"}\n:::\n',
            "1 min read: 0 words, 3 lines of code",
        ),
        (f"T\n\n::: hidden\n{'word ' * 400}\n:::\n", "1 min read: 1 word"),
    ],
)
def test_reading_time(render, page, said):
    assert reading_time(render(PAGE, page).stdout) == said


def test_only_a_chapter_has_a_reading_time(render):
    assert "reading-time" not in render("index.qmd", "word").stdout


def test_reading_time_stands_under_the_title(render):
    html = render(PAGE, "# The ring\n\nText.\n").stdout
    assert html.index("</h1>") < html.index("min read") < html.index("Text.")


RUN = '::: {.run name="02-cpu" cell="hello"}\n:::\n\n'
OF_ANOTHER_RUN = '::: {.run name="01-demo" cell="hello" kind="cpu"}\n:::\n\n'
TABLE_OF_OTHERS = '::: {.measured table="ring"}\n:::\n\n'
BADGE = re.compile(r'<div class="provenance (\w+(?: stale)?)( mark)?">\s*(.*?)\s*</div>', re.DOTALL)


@pytest.mark.parametrize(
    ("page", "marks"),
    [
        (RUN * 3, [False, True, True]),
        (f"{RUN}### Deeper\n\n{RUN}", [False, True]),
        (f"{RUN}## Next\n\n{RUN}{RUN}", [False, False, True]),
        (f"{RUN}::: {{.exercise}}\n{RUN}:::\n", [False, True]),
        (f"::: {{.answer}}\n{RUN}{RUN}:::\n\n{RUN}{RUN}", [False, True, False, True]),
        (f"{RUN}::: {{.answer}}\n{RUN}:::\n", [False, True]),
        (RUN + RUN.replace("02-cpu", "04-line").replace("hello", "timeline"), [False, False]),
        (TABLE_OF_OTHERS * 2 + RUN, [False, True, False]),
    ],
)
def test_a_section_has_a_badge_in_full_once(render, page, marks):
    page = page.replace('"timeline"', '"timeline" kind="cpu" fig-alt="A line."')
    found = BADGE.findall(render(PAGE, f"{page}## Last\n\n{OF_ANOTHER_RUN}").stdout)
    assert [bool(mark) for _, mark, _ in found] == [*marks, False]


@pytest.mark.parametrize(
    ("page", "said_at_the_head"),
    [
        (f"{RUN}## Next\n\n::: {{.answer}}\n{RUN}:::\n", True),
        (TABLE_OF_OTHERS * 2, True),
        (RUN, False),
        (RUN * 2 + TABLE_OF_OTHERS, False),
        (RUN * 2 + OF_ANOTHER_RUN, False),
    ],
)
def test_a_page_whose_outputs_have_one_badge_says_it_once(render, page, said_at_the_head):
    html = render(PAGE, f"Text.\n\n{page}").stdout
    badges = BADGE.findall(html)
    at_the_head = "All outputs of this page:" in html
    assert at_the_head == said_at_the_head
    if at_the_head:
        [(_, mark, badge)] = badges
        assert not mark
        assert re.search("CPU recording · .* commit|Measured by others", badge)
        assert html.index(badge) < html.index("Text.")
        assert ("../runs/02-cpu.qmd" in badge) == (RUN in page)
    else:
        assert len(badges) == len(re.findall("^::: ", page, re.MULTILINE))


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("hello", "CPU recording · 2-core AMD EPYC · 2 and 4 ranks over gloo · "),
        ("ranks", "CPU recording · 2-core AMD EPYC · 2 ranks over gloo · "),
        ("only-cpu", "CPU recording · 2-core AMD EPYC · no ranks · "),
        ("table", "Computed, not measured · 2026"),
    ],
)
def test_a_badge_says_what_ran_for_its_cell(render, cell, said):
    page = f'::: {{.run name="01-demo" cell="{cell}" kind="cpu"}}\n:::\n'
    [(classes, _, badge)] = BADGE.findall(render(PAGE, page).stdout)
    assert f">{said}" in badge
    assert classes == ("computed" if said.startswith("Computed") else "cpu")


def test_a_machine_with_fewer_gpus_has_not_run_the_ranks_that_a_cell_names(render, book):
    status = '{"02-cpu": {"cells": {"hello": "2 4"}}}'  # which ran on one rank
    (book / "recordings/status.json").write_text(status, encoding="utf-8")
    [(_, _, badge)] = BADGE.findall(render(PAGE, RUN).stdout)
    assert " · 1 rank" in badge


def test_a_value_says_what_ran_for_its_cell(render, book):
    status = '{"01-demo": {"cells": {"values": "computed"}}}'
    (book / "recordings/status.json").write_text(status, encoding="utf-8")
    page = '[]{.val run="01-demo" key="bandwidth" kind="cpu"}'
    assert 'data-tip="01-demo: Computed, not measured · ' in render(PAGE, page).stdout


def test_a_mark_says_what_the_badge_says_on_demand(render):
    (_, _, whole), (_, _, mark), _ = BADGE.findall(render(PAGE, RUN * 2 + OF_ANOTHER_RUN).stdout)
    address, text = re.fullmatch('<a href="(.*?)">(.*?)</a>', whole).groups()
    assert mark == f'<a href="{address}" data-tip="{text}">CPU recording</a>'


def test_a_mark_tells_a_stale_recording(render, book):
    (book / "recordings/status.json").write_text('{"02-cpu": {"cpu": "stale"}}', encoding="utf-8")
    _, (classes, _, mark), _ = BADGE.findall(render(PAGE, RUN * 2 + OF_ANOTHER_RUN).stdout)
    assert classes == "cpu stale"
    assert ">CPU recording, older than the code</a>" in mark


@pytest.mark.parametrize(
    ("texts", "classes"),
    [
        (["one"] * 2, "ranks"),
        (["one"] * 3, "ranks of-3"),
        (["one", "x" * 36 + "\nshort", "…" * 36], "ranks of-3"),
        (["one", "short\n" + "x" * 37, "two"], "ranks of-1"),
        (["x" * 50] * 4, "ranks"),
    ],
)
def test_three_ranks_leave_no_hole(render, book, texts, classes):
    path = book / "recordings/02-cpu.cpu.ipynb"
    notebook = json.loads(path.read_text(encoding="utf-8"))
    data = {"application/vnd.miniddp.ranks+json": {"ranks": texts}}
    notebook["cells"][-1]["outputs"] = [{"output_type": "display_data", "data": data}]
    path.write_text(json.dumps(notebook), encoding="utf-8")
    assert re.findall(r'<div class="(ranks.*?)">', render(PAGE, RUN).stdout) == [classes]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("So $n$.", ["$n$."]),
        ("($n$) and $m$ alone", ["($n$)"]),
        ("with [$n$]; $m$'s", ["[$n$];", "$m$'"]),
        ("that $n$-th, $m$**bold**", ["$n$-"]),
        ("$$n$$.", []),
    ],
)
def test_what_touches_a_formula_stays_on_its_line(render, text, kept):
    html = render(PAGE, text, to="html5").stdout
    formula = re.compile(r'<span class="math inline"><em>(.)</em></span>')
    found = re.findall(r'<span class="nobreak">(.*?)</span>', formula.sub(r"$\1$", html))
    assert [part.replace("’", "'") for part in found] == kept


def test_names_of_options_and_variables_stay_on_their_line(render):
    text = "`--nnodes` `--a_b-c` `OMP_NUM_THREADS` `--nnodes=2` `a-b` `rank` `--%s`" % ("x" * 40)
    html = render(PAGE, text, to="html5").stdout
    kept = re.findall(r'<code class="nobreak">(.*?)</code>', html)
    assert kept == ["--nnodes", "--a_b-c", "OMP_NUM_THREADS"]


def test_quote_without_a_repository_has_no_link(render, book):
    (book / "_quarto.yml").write_text("project:\n  type: book\n", encoding="utf-8")
    html = render(PAGE, '::: {.code symbol="miniddp:VERSION"}\n:::\n').stdout
    assert '<div class="code-file">\nsrc/miniddp/__init__.py\n</div>' in html


def test_source_with_windows_line_ends(render, book):
    path = book / "src/miniddp/ring.py"
    note = "`size = len(tensor) // parts  # rounded down`\n: A note."
    page = f'::: {{.code symbol="miniddp.ring:split"}}\n{note}\n:::\n'
    unix = render(PAGE, page).stdout
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert render(PAGE, page).stdout == unix


PROVENANCE = {
    "several GPUs, a rank each": (
        {"kind": "gpu", "device": "NVIDIA A100", "device_count": 4, "backend": ["nccl"]},
        "GPU recording · 4 × NVIDIA A100 · 2 and 4 ranks on 4 GPUs over nccl",
    ),
    "more ranks than GPUs": (
        {"kind": "gpu", "device": "NVIDIA A100", "device_count": 2},
        "GPU recording · 2 × NVIDIA A100 · 2 and 4 ranks sharing 2 GPUs over gloo",
    ),
    "one rank without a group": (
        {"world_size": [1], "backend": []},
        "CPU recording · 2-core AMD EPYC · 1 rank",
    ),
    "three sizes, two backends": (
        {"world_size": [2, 4, 8], "backend": ["gloo", "mpi"]},
        "CPU recording · 2-core AMD EPYC · 2, 4 and 8 ranks over gloo and mpi",
    ),
}


@pytest.mark.parametrize("case", PROVENANCE)
def test_badge(render, book, case):
    changes, expected = PROVENANCE[case]
    kind = changes.get("kind", "cpu")
    recording = json.loads((book / "recordings/01-demo.cpu.ipynb").read_text(encoding="utf-8"))
    recording["metadata"]["miniddp"].update(changes)
    path = book / f"recordings/03-missing.{kind}.ipynb"
    path.write_text(json.dumps(recording), encoding="utf-8")
    html = render(PAGE, '::: {.run name="03-missing" cell="hello"}\n:::\n').stdout
    assert badge(html) == f"{expected} · torch 2.13.0 · 2026-11-21 · commit abc1234"


def test_badge_of_a_recording_with_local_changes(render):
    html = render(PAGE, '::: {.run name="02-cpu" cell="hello"}\n:::\n').stdout
    assert badge(html).endswith("commit feedfac with local changes")


def test_badge_of_a_recording_whose_behaviour_was_declared_unchanged(render, book):
    path = book / "recordings/02-cpu.cpu.ipynb"
    recording = json.loads(path.read_text(encoding="utf-8"))
    said = {"reason": "renamed", "date": "2026-12-01", "commit": "c" * 40}
    recording["metadata"]["miniddp"]["accepted"] = [said]
    path.write_text(json.dumps(recording), encoding="utf-8")
    html = render(PAGE, '::: {.run name="02-cpu" cell="hello"}\n:::\n').stdout
    assert badge(html).endswith(" · the code changed since, its behaviour did not")
    html = render(PAGE, '::: {.notebook name="02-cpu"}\n:::\n').stdout
    assert "renamed (2026-12-01, commit ccccccc)" in html


def test_without_a_status_file_nothing_is_stale(render, book):
    (book / "recordings/status.json").unlink()
    html = render(PAGE, '::: {.run name="01-demo" cell="hello"}\n:::\n').stdout
    assert "stale" not in html
    assert "latest change" not in html


BIBLIOGRAPHY = "---\nbibliography: references.bib\n---\n\n"
SOURCE = "@misc{li2020, author={Li, Shen}, title={DDP}, year={2020}}\n"
HEADING = '<h2 class="unnumbered" id="references">References</h2>\n<div id="refs" role="list">'


@pytest.mark.parametrize(
    "text",
    [
        "See [@li2020].",
        "::: {.takeaways}\n- See [@li2020].\n:::",
        '::: {.diagram src="vis/ring.svg" #fig-ring}\nA ring [@li2020].\n:::',
        '::: {.run name="01-demo" cell="hello" #fig-hello}\nHello [@li2020].\n:::',
        "::: {.exercise}\nWhy?\n\n::: {.answer}\nSee [@li2020].\n:::\n:::",
    ],
    ids=["prose", "box", "diagram", "run", "answer"],
)
def test_what_cites_ends_with_its_references(render, book, text):
    (book / "references.bib").write_text(SOURCE, encoding="utf-8")
    done = render(PAGE, f"{BIBLIOGRAPHY}# The ring\n\n{text}\n")
    assert done.stderr == ""
    assert 'data-cites="li2020"' in done.stdout
    assert done.stdout.removesuffix("\n\n</div>\n").endswith(HEADING)


def test_recorded_text_can_cite(render, book):
    (book / "references.bib").write_text(SOURCE, encoding="utf-8")
    path = book / "recordings/01-demo.cpu.ipynb"
    recording = json.loads(path.read_text(encoding="utf-8"))
    table = "| a |\n|---|\n| [@li2020] |\n"
    recording["cells"].append(
        {
            "cell_type": "code",
            "metadata": {"name": "cites"},
            "source": "table()",
            "outputs": [{"output_type": "display_data", "data": {"text/markdown": table}}],
        }
    )
    path.write_text(json.dumps(recording), encoding="utf-8")
    html = render(PAGE, BIBLIOGRAPHY + '::: {.run name="01-demo" cell="cites"}\n:::\n').stdout
    assert '<td><span class="citation" data-cites="li2020">' in html
    assert HEADING in html


def test_cross_references_alone_need_no_bibliography(render):
    done = render(PAGE, '::: {.diagram src="vis/ring.svg" #fig-ring}\nA ring.\n:::\n\n@fig-ring\n')
    assert done.stderr == ""
    assert "References" not in done.stdout


@pytest.mark.parametrize("space", [" ", "\\ ", "\n"])
def test_a_tooltip_leaves_citations_out(render, book, space):
    glossary = f"rank\n: One process{space}[@li2020], with a number.\n"
    (book / "appendix/glossary.qmd").write_text(glossary, encoding="utf-8")
    html = render(PAGE, "A [rank]{.term}.\n").stdout
    assert 'data-tip="One process, with a number."' in html


TABLE = {
    "torch": "2.13.0",
    "sections": {
        "hooks": [
            {
                "behaviour": "A hook sees `bucket`.",
                "torch": "yes",
                "miniddp": "yes",
                "tolerance": "rtol 1e-4",
                "test": "tests/test_a.py::test_hook",
            }
        ],
        "differ": [
            {
                "behaviour": "Two backward passes.",
                "torch": "One is lost.",
                "miniddp": "An *error*.",
                "tolerance": "",
                "test": "tests/test_b.py::twice",
            }
        ],
    },
}


@pytest.fixture
def parity(book):
    (book / "tests").mkdir()
    (book / "tests/parity.json").write_text(json.dumps(TABLE), encoding="utf-8")


@pytest.mark.usefixtures("parity")
def test_parity(render):
    html = render(PAGE, '::: {.parity section="hooks"}\n:::\n').stdout
    assert re.findall(r"<th>(.*?)</th>", html) == ["Both do this", "Tolerance"]
    assert "A hook sees <code>bucket</code>." in html
    link = "https://example.org/fixture/blob/trunk/tests/test_a.py"
    assert f'<a href="{link}"><code>test_hook</code></a>' in html
    assert '<td><span class="nobreak">rtol\u00a01e-4</span></td>' in html
    assert "Seen with torch 2.13.0" in html


def test_collectives_are_listed_with_their_largest_bandwidth(render, book):
    folder = book / "measurements"
    text = (folder / "sources.toml").read_text(encoding="utf-8")
    text = text.replace("rate =", "busbw_gb_per_s =")
    (folder / "sources.toml").write_text(text, encoding="utf-8")
    for file in folder.glob("*.csv"):
        file.write_text(file.read_text(encoding="utf-8").replace("rate", "busbw_gb_per_s"))
    (folder / "copied.csv").unlink()
    html = render(PAGE, "::: {.measurements}\n:::\n").stdout
    assert "Largest bus bandwidth (GB/s)" in html
    numbers = re.findall(
        r'A ring of eight</a></th>\s*<td style="text-align: right;">(.*?)</td>', html
    )
    assert numbers == ["300"]


@pytest.mark.usefixtures("parity")
def test_parity_without_tolerances_has_no_column_for_them(render):
    html = render(PAGE, '::: {.parity section="differ"}\n:::\n').stdout
    assert re.findall(r"<th>(.*?)</th>", html) == ["Behaviour", "torch", "miniddp"]
    assert "An <em>error</em>." in html


def test_parity_counted(render, book):
    does = {"a": "passes, always", "b": "refused: *x*", "c": "passes, always", "d": "passes"}
    rows = [TABLE["sections"]["hooks"][0] | {"behaviour": f"`{name}`", "miniddp": what}
            for name, what in does.items()]  # fmt: skip
    (book / "tests").mkdir()
    table = {"torch": "2.13.0", "sections": {"theirs": rows}}
    (book / "tests/parity.json").write_text(json.dumps(table), encoding="utf-8")
    html = render(PAGE, '::: {.parity .counted section="theirs"}\n:::\n').stdout
    cells = re.findall(r"<td[^>]*>(.*?)(?:\s*<div.*?)?</td>", html, re.DOTALL)
    assert cells == ["passes, always", "2", "refused: <em>x</em>", "1", "passes", "1"]
    assert "<p>passes 3, refused 1: 4 in all</p>" in html


@pytest.mark.usefixtures("parity")
def test_parity_of_no_section(render):
    done = render(PAGE, '::: {.parity section="hook"}\n:::\n')
    assert done.stderr == (
        f'{PAGE}:1: .parity section="hook": no such section in tests/parity.json '
        "(it has: differ, hooks)\n"
    )


def test_parity_without_a_table(render):
    done = render(PAGE, '::: {.parity section="hook"}\n:::\n')
    assert "there is no tests/parity.json (make it with: make parity)" in done.stderr


@pytest.mark.parametrize(
    ("package", "wheel", "message"),
    [
        ("gear", "", "there are no modules in src/gear"),
        ("gears", "import os\n", "src/gears/wheel.py has no docstring"),
        (
            "gears",
            '"""A wheel."""\n\n\ndef turn(): ...\n',
            "src/gears/__init__.py exports Link, which no module documents",
        ),
    ],
)
def test_a_reference_that_lacks_something(render, book, package, wheel, message):
    (book / "src/gears/wheel.py").write_text(wheel, encoding="utf-8")
    done = render(PAGE, f'::: {{.reference package="{package}"}}\n:::\n')
    assert done.stderr == f'{PAGE}:1: .reference package="{package}": {message}\n'


def test_a_reference_shows_the_rooms_of_a_package(render, book):
    room = book / "src/gears/box/inner"
    room.mkdir(parents=True)
    for package in (room, room.parent):
        (package / "__init__.py").write_text('"""A room."""\n', encoding="utf-8")
    (room / "axle.py").write_text(
        '"""What turns."""\n\n\ndef turn():\n    """Turn."""\n\n\ndef oil():\n    """Oil."""\n',
        encoding="utf-8",
    )
    html = render(PAGE, '::: {.reference package="gears"}\n:::\n').stdout
    assert re.findall(r"<h3 .*?>(.*?)</h3>", html) == [
        "<code>gears.wheel</code>",
        "<code>gears.box.inner.axle</code>",
    ]
    assert '<h4 id="api-gears-box-inner-axle-oil"><code>oil</code></h4>' in html
    assert "/src/gears/box/inner/axle.py" in html
    assert '<a href="#api-gears-wheel-turn"><code>turn</code></a>' in html, "the first of two"


def test_a_reference_of_some_modules(render, book):
    (book / "src/gears/teeth").mkdir()
    (book / "src/gears/teeth/__init__.py").write_text(
        '"""Of a wheel."""\n\n\nCOUNT = 4\n"""How many."""\n', encoding="utf-8"
    )
    some = '::: {.reference package="gears" modules="%s"}\n:::\n'
    html = render(PAGE, some % "teeth/__init__").stdout
    assert re.findall(r"<h3 id=(.*?)>", html) == ['"api-gears-teeth"']
    assert '<h4 id="api-gears-teeth-COUNT">' in html
    assert "there is no src/gears/tooth.py" in render(PAGE, some % "tooth").stderr


def test_a_tooltip_shows_formulas_as_text(render, book):
    (book / "appendix/glossary.qmd").write_text("rank\n: One of $2^N-1$.\n", encoding="utf-8")
    assert 'data-tip="One of 2^(N) − 1."' in render(PAGE, "A [rank]{.term}.\n").stdout


def test_versions_are_those_of_the_recordings(render, book):
    html = render(PAGE, "::: {.versions}\n:::\n").stdout
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", html, re.DOTALL)
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in rows]
    assert cells[0][1:] == ["CPU recordings", "GPU recordings"]
    found = {name: rest for name, *rest in cells[1:]}
    assert found["Device"][0] == "2-core AMD EPYC"
    assert found["torch"] == ["2.13.0", "2.13.0"]


def test_versions_need_a_recording(render, book):
    for path in (book / "recordings").glob("*.ipynb"):
        path.unlink()
    done = render(PAGE, "::: {.versions}\n:::\n")
    assert done.stderr == f"{PAGE}:1: .versions: there are no recordings\n"


CFF = """cff-version: 1.2.0
title: "The Book's Title"
authors:
  - given-names: Ada
    family-names: O'Neill
  - name: "The others' group"
version: 0.1.0
date-released: "2026-11-21"
repository-code: "https://example.org/code"
"""


def test_how_to_cite(render, book):
    (book / "CITATION.cff").write_text(CFF, encoding="utf-8")
    html = render(PAGE, "::: {.cite}\n:::\n").stdout
    assert (
        '<div class="cite">\n<pre class="text"><code>@software{the-book-s-title,\n'
        "  title   = {The Book&#39;s Title},\n"
        "  author  = {O&#39;Neill, Ada and {The others&#39; group}},\n"
        "  year    = {2026},\n"
        "  version = {0.1.0},\n"
        "  url     = {https://example.org/code}\n"
        "}</code></pre>\n</div>"
    ) in html


def test_a_citation_lacks_nothing(render, book):
    (book / "CITATION.cff").write_text(CFF.replace("\nversion", "\nwersion"), encoding="utf-8")
    done = render(PAGE, "::: {.cite}\n:::\n")
    assert done.stderr == f"{PAGE}:1: .cite: CITATION.cff has no version\n"


def test_links_into_the_repository(render, book):
    (book / "LICENSE").write_text("MIT", encoding="utf-8")
    text = "[MIT](repo:LICENSE), [part](repo:LICENSE#part)\n\n```bash\ngit clone repo: book\n```\n"
    html = render(PAGE, text).stdout
    assert '<a href="https://example.org/fixture/blob/trunk/LICENSE">MIT</a>' in html
    assert '<a href="https://example.org/fixture/blob/trunk/LICENSE#part">part</a>' in html
    assert "git clone https://example.org/fixture book" in html
    done = render(PAGE, "[no](repo:NONE)\n")
    assert done.stderr == f"{PAGE}: it links to repo:NONE: there is no such file\n"


def test_notebooks_open_in_colab_and_kaggle_if_they_are_on_github(render, book):
    text = '[a](colab:recordings/01-demo.cpu.ipynb)\n\n::: {.notebook name="02-cpu"}\n:::\n'
    html = render(PAGE, text).stdout
    assert "<p>a</p>" in html
    assert "Open in" not in html
    config = "book:\n  repo-url: https://github.com/you/book\n  repo-branch: trunk\n"
    (book / "_quarto.yml").write_text(config, encoding="utf-8")
    notebook = book / "recordings/02-cpu.cpu.ipynb"
    first = (
        '"cells": [{"cell_type": "code", "metadata": {"name": "anywhere"}, "source": "fetch()"},'
    )
    whole = notebook.read_text(encoding="utf-8").replace('"cells": [', first, 1)
    notebook.write_text(whole, encoding="utf-8")
    html = render(PAGE, text).stdout
    there = "you/book/blob/trunk/recordings/"
    assert (
        f'<a href="https://colab.research.google.com/github/{there}01-demo.cpu.ipynb">a</a>' in html
    )
    kaggle = "https://www.kaggle.com/kernels/welcome?src=https://github.com"
    assert f'<a href="{kaggle}/{there}02-cpu.cpu.ipynb">Open in Kaggle</a>' in html
    assert "fetch" not in html
    done = render(PAGE, "[no](kaggle:runs/none.ipynb)\n")
    assert done.stderr == f"{PAGE}: it opens runs/none.ipynb: there is no such file\n"


def test_a_book_without_a_repository_links_to_none(render, book):
    (book / "LICENSE").write_text("MIT", encoding="utf-8")
    (book / "_quarto.yml").write_text("book:\n  title: Fixture\n", encoding="utf-8")
    assert "<p>MIT</p>" in render(PAGE, "[MIT](repo:LICENSE)\n").stdout


def test_a_document_of_the_repository(render, book):
    (book / "CHANGES.md").write_text("# Changes\n\n## 0.1 (today)\n\n- New.\n", encoding="utf-8")
    html = render(PAGE, '## What changed\n\n::: {.document file="CHANGES.md"}\n:::\n').stdout
    assert 'id="changes-md-today"' in html
    assert "<h3>0.1 (today)</h3>" in html
    assert "<li>New.</li>" in html
    assert "Changes</h1>" not in html
    done = render(PAGE, '::: {.document file="GONE.md"}\n:::\n')
    assert done.stderr == f'{PAGE}:1: .document file="GONE.md": no such file: GONE.md\n'


@pytest.mark.parametrize(
    ("head", "names"),
    [
        ("| | a | |", ["Row", "a", "Column 3"]),
        ("| a | b | c |", ["a", "b", "c"]),
        ("| $x$ | `b` | |", [None, "<code>b</code>", "Column 3"]),
    ],
)
def test_every_header_of_a_table_has_a_name(render, head, names):
    html = render(PAGE, f"{head}\n|---|---|---|\n| 1 | | 3 |\n").stdout
    cells = re.findall(r"<th>(.*?)</th>", html)
    hidden = '<span class="visually-hidden">{}</span>'
    for cell, name in zip(cells, names, strict=True):
        assert name is None or cell in (name, hidden.format(name))
    assert "visually-hidden" not in html.split("<tbody>")[1]


def test_a_table_without_headers_gets_none(render):
    html = render(PAGE, "| | |\n|---|---|\n| 1 | 2 |\n").stdout
    assert "visually-hidden" not in html


def test_what_others_traced_has_a_folder_of_its_own(render, book):
    """Values, tables and drawings are quoted from it, and the appendix lists it."""
    folder = book / "measurements"
    (folder / "traces").mkdir()
    (folder / "ring.csv").rename(folder / "traces/steps.csv")
    text = (folder / "sources.toml").read_text(encoding="utf-8")
    text = text.replace("[ring]", "[steps]").replace('licence = "', 'sha256 = "0a1b"\nlicence = "')
    (folder / "traces/sources.toml").write_text(text, encoding="utf-8")
    drawn = '::: {.diagram src="vis/ring.svg" table="traces/steps"}\n:::\n'
    html = render(PAGE, drawn).stdout
    assert "<svg" in html
    assert 'href="../appendix/measurements.qmd#steps">Measured by others' in html
    listed = render("appendix/measurements.qmd", "::: {.measurements}\n:::\n").stdout
    assert 'href="../measurements/traces/steps.csv" download="steps.csv"' in listed
    assert "0a1b" in listed
    failed = render(PAGE, '[]{.val table="traces/rong" where="a=b" column="c"}\n')
    assert "there is no measurements/traces/rong.csv (there are: steps)" in failed.stderr
