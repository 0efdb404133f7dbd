"""tools/quoted.py: quotes of what is not there, and lines that no chapter quotes."""

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
        (tmp_path / f"src/miniddp/{name}.py").parent.mkdir(exist_ok=True)
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
    (quote,) = quoted.quotes(book)
    is_of_ring = quote.file == "src/miniddp/ring.py"
    seen = quoted.lines_of(MODULE, quote) if is_of_ring else set()
    assert quoted.code_lines(MODULE) - seen == left
    assert (list(quoted.unquoted(book)) == []) == (left == set())


def test_it_says_where(book: Path) -> None:
    quote = '::: {.code symbol="miniddp.ring:Ring" members="size\nsend"}\n:::\n'
    (book / "index.qmd").write_text(quote, encoding="utf-8")
    assert list(quoted.unquoted(book)) == [
        "src/miniddp/ring.py, line 6: no chapter quotes `CAP = 1`",
        "src/miniddp/ring.py, lines 22 to 29: no chapter quotes `def receive(self):`",
    ]


STAGE = "import os\n\nrank = {}\nprint(rank)\nif rank:\n    print(rank)\n"
STAGES = {"stages/1_one.py": STAGE.format(0), "stages/2_two.py": STAGE.format(1)}
SEND = 'symbol="miniddp.ring:Ring.send" docstring="no"'
PART = 'symbol="miniddp.ring:Ring" members="size send"'
ONE = 'file="stages/1_one.py"'
DIFF = 'from="stages/1_one.py" to="stages/2_two.py"'


def problems(book: Path, kind: str, attributes: str, note: str) -> list[str]:
    """What is said of a quote on the third line of a chapter."""
    for name, text in STAGES.items():
        (book / name).parent.mkdir(exist_ok=True)
        (book / name).write_text(text, encoding="utf-8")
    notes = f"{note}\n\n:   Why.\n" if note else ""
    page = f"# One\n\n::::: {{.{kind} {attributes}}}\n{notes}:::::\n"
    (book / "chapters/05-ring.qmd").write_text(page, encoding="utf-8")
    where = f"chapters/05-ring.qmd:3: .{kind} {attributes}: "
    found = list(quoted.broken(book))
    assert all(problem.startswith(where) for problem in found)
    return [problem.removeprefix(where) for problem in found]


@pytest.mark.parametrize(
    ("kind", "attributes", "note"),
    [
        ("code", SEND, ""),
        ("code", SEND, "`return self.size`"),
        ("code", SEND, "`def send(self):` `return self.size`"),
        ("code", PART, "`size: int = 4`"),
        ("code", 'symbol="miniddp.ring:CAP" fold="All"', "`CAP = 1`"),
        ("code", ONE, "`rank = 0`"),
        ("code", ONE, "`if rank:` `print(rank)`"),
        ("code", f'{ONE} symbol="rank"', "`rank = 0`"),
        ("diff", DIFF, "`import os`"),
        ("diff", DIFF, "`- rank = 0`"),
        ("diff", DIFF, "`+ rank = 1`"),
    ],
)
def test_a_quote_of_what_is_there(book: Path, kind: str, attributes: str, note: str) -> None:
    assert problems(book, kind, attributes, note) == []


RING_PART = "in the quoted part of src/miniddp/ring.py"
ONE_PART = "in the quoted part of stages/1_one.py"
CHANGES = "in what changes from stages/1_one.py to stages/2_two.py"


@pytest.mark.parametrize(
    ("kind", "attributes", "note", "problem"),
    [
        ("code", SEND, "`return self.siz`", f"no line `return self.siz` {RING_PART}"),
        ("code", SEND, "`def receive(self):`", f"no line `def receive(self):` {RING_PART}"),
        ("code", PART, "`return text`", f"no line `return text` {RING_PART}"),
        (
            "code",
            SEND,
            "`@math.cache` `return self.size`",
            f"no line `return self.size` {RING_PART}",
        ),
        ("code", ONE, "`print(rank)`", f"2 lines read `print(rank)` {ONE_PART}"),
        ("code", 'symbol="miniddp.ring:ring"', "", "no such symbol in src/miniddp/ring.py: ring"),
        (
            "code",
            'symbol="miniddp.ring:Ring" members="sent"',
            "",
            "no such symbol in src/miniddp/ring.py: Ring.sent",
        ),
        ("code", 'symbol="miniddp.rings:Ring"', "", "there is no src/miniddp/rings.py"),
        ("code", 'file="stages/3_three.py"', "`rank = 0`", "there is no stages/3_three.py"),
        ("diff", DIFF, "`+ rank = 0`", f"no line `+ rank = 0` {CHANGES}"),
        ("diff", DIFF, "`- rank = 1`", f"no line `- rank = 1` {CHANGES}"),
        ("diff", DIFF, "`import math`", f"no line `import math` {CHANGES}"),
        ("diff", DIFF.replace("2_two", "3_three"), "", "no such file: stages/3_three.py"),
    ],
)
def test_a_quote_of_what_is_not_there(
    book: Path, kind: str, attributes: str, note: str, problem: str
) -> None:
    assert problems(book, kind, attributes, note) == [problem]
