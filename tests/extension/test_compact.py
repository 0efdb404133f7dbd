"""Figures are made small for a page: what they show and say stays."""

from __future__ import annotations

import json
import re
import subprocess
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import pypandoc
import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SVG = "{http://www.w3.org/2000/svg}"
HEAD = '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'


def recorded_figures() -> dict[str, str]:
    found = {}
    for path in sorted(ROOT.glob("recordings/*.ipynb")):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            for output in cell.get("outputs", []):
                if svg := output.get("data", {}).get("image/svg+xml"):
                    found[f"{path.stem}:{cell['metadata'].get('name')}"] = "".join(svg)
    return found


FIGURES = recorded_figures()


def compact(figure: str, folder: Path) -> str:
    path = folder / "figure.svg"
    path.write_text(figure, encoding="utf-8")
    extension = ROOT / "_extensions" / "ddp-book"
    command = [pypandoc.get_pandoc_path(), "lua", HERE / "compact.lua", extension, path]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def texts(root: ElementTree.Element) -> list[str]:
    return ["".join(text.itertext()).split() for text in root.iter(f"{SVG}text")]


def drawn(root: ElementTree.Element) -> Counter[str]:
    """How many elements of each kind show something: not the paths without fill and stroke."""
    tags = (element.tag for element in root.iter() if element.get("style") != "fill: none")
    return Counter(tag for tag in tags if tag not in (f"{SVG}g", f"{SVG}style"))


@pytest.mark.parametrize("name", FIGURES)
def test_a_recorded_figure_keeps_what_it_shows(name: str, tmp_path: Path) -> None:
    made = compact(FIGURES[name], tmp_path)
    before, after = ElementTree.fromstring(FIGURES[name]), ElementTree.fromstring(made)
    assert texts(after) == texts(before)
    assert drawn(after) == drawn(before)
    assert len(made) < 0.65 * len(FIGURES[name])
    styles = dict(re.findall(r"\.(small-\d+) \{ (.*?) \}", made))
    resolved = [
        styles.get(element.get("class", ""), element.get("style")) for element in after.iter()
    ]
    given = [element.get("style") for element in before.iter()]
    assert Counter(filter(None, resolved[1:])) == Counter(
        style for style in filter(None, given[1:]) if style != "fill: none"
    )


def test_there_are_figures() -> None:
    assert FIGURES


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('<path d="M 0.123456 1 \nL 2 3.999 \nz\n" x="1"/>', '<path d="M0.12 1L2 4z" x="1"/>'),
        ('<text x="1.23456">1.23456</text>', '<text x="1.23">1.23456</text>'),
        ('<text x="1" transform="rotate(-0 1 2)">a</text>', '<text x="1">a</text>'),
        ('<text transform="rotate(-9 1 2)">a</text>', '<text transform="rotate(-9 1 2)">a</text>'),
        ('<g>\n <g clip-path="url(#a)">\n  <g>\n   <use/>\n  </g>\n </g>\n</g>',
         '\n<g clip-path="url(#a)">\n<use/>\n</g>\n'),
        ('<path d="M 0 0" style="fill: none"/><use/>', "<use/>"),
        ('<a style="b: c"/>', '<a style="b: c"/>'),
        ('<a style="b: c"/><a style="b: c" x="1"/>',
         '<style>.small-1 { b: c }</style><a class="small-1"/><a class="small-1" x="1"/>'),
    ],
)  # fmt: skip
def test_what_becomes_smaller(before: str, after: str, tmp_path: Path) -> None:
    assert compact(f"{HEAD}{before}</svg>", tmp_path) == f"{HEAD}{after}</svg>"
