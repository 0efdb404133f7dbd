"""tools/quoted.py: which lines of the learner's path no chapter quotes."""

from pathlib import Path

import pytest

import quoted

MODULE = '''"""A module."""

import math

# What is shared.
CAP = 1

__all__ = ["Ring"]


@math.cache
class Ring:
    """A ring."""

    size: int = 4

    def send(self):
        """Send."""

        return self.size

    def receive(self):
        text = """
not a docstring
"""
        return text


def last(): return 1
'''
CODE = {6, 11, 12, 15, 17, 20, 22, 23, 24, 25, 26, 29}


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """A book in whose path only `ring` has code; index.qmd quotes nothing."""
    (tmp_path / "src/miniddp").mkdir(parents=True)
    (tmp_path / "chapters").mkdir()
    for name in quoted.PATH:
        (tmp_path / f"src/miniddp/{name}.py").write_text("", encoding="utf-8")
    (tmp_path / "src/miniddp/ring.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "index.qmd").write_text("# A book\n", encoding="utf-8")
    return tmp_path


def test_what_is_code() -> None:
    assert quoted.code_lines(MODULE) == CODE


@pytest.mark.parametrize(
    ("attributes", "left"),
    [
        ('symbol="miniddp.ring:CAP"', CODE - {6}),
        ('symbol="miniddp.ring:last" docstring="no"', CODE - {29}),
        ('symbol="miniddp.ring:Ring"', {6, 29}),
        ('symbol="miniddp.ring:Ring.receive"', CODE - set(range(22, 27))),
        ('symbol="miniddp.ring:Ring" members="size send"', CODE - {11, 12, 15, 17, 20}),
        ('file="src/miniddp/ring.py"', set()),
        ('file="src/miniddp/ring.py" symbol="CAP" fold="All"', CODE - {6}),
        ('symbol="miniddp.naive:CAP"', CODE),
        ('symbol="miniddp.ring:gone"', CODE),
    ],
)
def test_what_a_quote_leaves(book: Path, attributes: str, left: set[int]) -> None:
    page = f"# One\n\n::: {{.code {attributes}}}\n:::\n"
    (book / "chapters/05-ring.qmd").write_text(page, encoding="utf-8")
    (quote,) = quoted.attributes_of_quotes(book)
    seen = (
        quoted.lines_of(MODULE, quote)
        if quoted.quotes_file(quote, "src/miniddp/ring.py")
        else set()
    )
    assert quoted.code_lines(MODULE) - seen == left
    assert (list(quoted.unquoted(book)) == []) == (left == set())


def test_it_says_where(book: Path) -> None:
    quote = '::: {.code symbol="miniddp.ring:Ring" members="size\nsend"}\n:::\n'
    (book / "index.qmd").write_text(quote, encoding="utf-8")
    assert list(quoted.unquoted(book)) == [
        "src/miniddp/ring.py, line 6: no chapter quotes `CAP = 1`",
        "src/miniddp/ring.py, lines 22 to 29: no chapter quotes `def receive(self):`",
    ]
