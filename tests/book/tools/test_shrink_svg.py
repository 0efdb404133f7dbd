"""Figures are made small when they are recorded: what they show and say stays."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections import Counter

import matplotlib.pyplot as plt
import pytest

import book
from shrink_svg import shrink_svg

SVG = "{http://www.w3.org/2000/svg}"


def drawn(svg: str) -> tuple[list[str], Counter[str], Counter[str]]:
    """A figure's texts, how many elements of each kind show something, and their styles."""
    styles = dict(re.findall(r"\.(s[0-9a-f]{6}) \{ (.*?) \}", svg))
    shown = [each for each in ElementTree.fromstring(svg).iter() if each.tag != f"{SVG}style"]
    return (
        ["".join(each.itertext()) for each in shown if each.tag == f"{SVG}text"],
        Counter(each.tag for each in shown if each.tag != f"{SVG}g"),
        Counter(styles.get(each.get("class", ""), each.get("style")) for each in shown),
    )


def test_a_figure_keeps_what_it_shows() -> None:
    figure, axes = plt.subplots()
    axes.plot([1, 2, 3], [1.23456, 4, 2], marker="o", label="1.23456 of all")
    axes.legend()
    svg = book._svg(figure)
    plt.close(figure)
    small = shrink_svg(svg)
    for before, after in zip(drawn(svg), drawn(small), strict=True):
        if isinstance(before, Counter):
            del before[None], after[None]
        assert after == before
    assert len(small) < 0.65 * len(svg)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('<path d="M 0.123456 1 \nL 2 3.999 \nz\n" x="1"/>', '<path d="M0.12 1L2 4z" x="1"/>'),
        ('<text x="1.23456">1.23456</text>', '<text x="1.23">1.23456</text>'),
        ('<path d="M 100.0001 0"/>', '<path d="M100 0"/>'),
        ('<a style="b: c"/>', '<a style="b: c"/>'),
        (
            '<a style="b: c"/><a style="b: c" x="1"/>',
            '<style>.se4aed0 { b: c }</style><a class="se4aed0"/><a class="se4aed0" x="1"/>',
        ),
    ],
)
def test_what_becomes_smaller(before: str, after: str) -> None:
    assert shrink_svg(f"<svg>{before}</svg>") == f"<svg>{after}</svg>"
