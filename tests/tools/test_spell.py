"""tools/spell.py: which words of a file are read, and which of them are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from hunspell import Hunspell

import spell

KNOWN = {"torchrun", "Pandoc", "optimizer", "dtype"}


@pytest.fixture(scope="module")
def dictionary() -> Hunspell:
    return Hunspell(spell.DICTIONARY)


@pytest.mark.parametrize(
    "word",
    [
        "gradient",
        "Gradients",
        "don't",
        "rank's",
        "synchronise",
        "parallelisation",
        "behaviour",
        "neighbours",
        "modelling",
        "labelled",
        "centre",
        "licence",
        "analyse",
        "grey",
        "catalogue",
        "size",
        "prized",
        "seizes",
        "resizing",
        "torchrun",
        "Torchrun",
        "torchrun's",
        "Pandoc",
        "optimizers",
        "dtypes",
        "London",
    ],
)
def test_what_is_right(dictionary: Hunspell, word: str) -> None:
    assert spell.problem(word, dictionary, KNOWN) is None


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("recieve", "'recieve' is unknown (near: receive"),
        ("gradiant", "'gradiant' is unknown (near:"),
        ("pandoc", "'pandoc' is unknown"),
        ("synchronize", "'synchronize': the book is British, it writes 'synchronise'"),
        ("Behavior", "'Behavior': the book is British, it writes 'Behaviour'"),
        ("modeling", "'modeling': the book is British, it writes 'modelling'"),
        ("center", "'center': the book is British, it writes 'centre'"),
        ("analyze", "'analyze': the book is British, it writes 'analyse'"),
    ],
)
def test_what_is_wrong(dictionary: Hunspell, word: str, message: str) -> None:
    assert (spell.problem(word, dictionary, KNOWN) or "").startswith(message)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.qmd", "One *two* `thre` [four](fiv.qmd){.sixx} @seven $eigt$", "one two four"),
        ("a.qmd", "---\ntitle: A tytle\ndescription: >-\n  Moor\nlang: xx\n---\n", "tytle moor"),
        ("a.qmd", '::: {.run name="nam" fig-alt="A curv."}\nCaption\n:::\n', "caption curv"),
        ("a.qmd", "```python\ncod = 1\n```\n\n$$\nx = yy\n$$\n\n<!-- comment -->\nafter", "after"),
        ("a.qmd", "GPU fp16 NVLink my_name a.b path/to all-reduce --flag it’s", "all reduce it's"),
        ("a.md", "See <https://exampel.org> and https://exampel.org/abc.", "see and"),
        (
            "src/a.py",
            '"""Modul `cod`."""\nx = "strng"\n\n\ndef f():\n    """Doc of "valu"."""  # comment\n',
            "modul doc",
        ),
        ("runs/01-a.py", "# %% [markdown]\n# # Titel\n# `cod`\n\n# %%\n# comment\n", "titel"),
        (
            "vis/a.svg",
            "<svg xmlns='http://www.w3.org/2000/svg'><title>Tytle</title><style>svg x</style>"
            "<text>rank <tspan>thre</tspan> for</text></svg>",
            "tytle rank thre for",
        ),
    ],
)  # fmt: skip
def test_what_is_read(tmp_path: Path, name: str, text: str, expected: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    words = [word.lower() for _, word in spell.words(path)]
    assert sorted(word for word in words if word != "of") == sorted(expected.split())


def test_words_have_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.qmd"
    path.write_text(
        "---\ntitle: First\n---\n\n```\ncode\n```\n\nNinth `x`\ntenth\n", encoding="utf-8"
    )
    assert list(spell.words(path)) == [(2, "First"), (9, "Ninth"), (10, "tenth")]


def test_the_list_of_words_is_sorted_and_each_is_needed() -> None:
    words = spell.WORDS.read_text(encoding="utf-8").splitlines()
    assert words == sorted(set(words), key=lambda word: (word.lower(), word))
    dictionary = Hunspell(spell.DICTIONARY)
    assert [word for word in words if spell.problem(word, dictionary, set()) is None] == []
