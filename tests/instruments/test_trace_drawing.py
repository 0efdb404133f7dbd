"""The drawings of published traces are what their tables give."""

import pytest

from instruments.trace_drawing import DRAWINGS, FOLDER
from instruments.trace_drawing.steps import columns
from instruments.trace_drawing.svg import Scale


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_is_what_its_table_gives(name):
    again = "draw it again: python -m instruments.trace_drawing"
    assert (FOLDER / f"{name}.svg").read_text(encoding="utf-8") == DRAWINGS[name](), again


def test_a_column_is_as_high_as_its_share():
    """Of 354 columns of 1 ms: one is busy for a half, two for all of their time."""
    drawn = columns([(10, 10.5), (20, 22)], Scale(0, 354), 0, "bar")
    assert drawn == [
        '<rect class="bar" x="88" y="14" width="1" height="14" />',
        '<rect class="bar" x="98" y="0" width="2" height="28" />',
    ]
