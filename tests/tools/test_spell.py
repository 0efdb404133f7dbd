"""tools/spell.py: misspellings where a reader reads them, found with their place; code left out."""

from __future__ import annotations

from pathlib import Path

import pytest

import spell

PAGE = """\
---
title: A tytle
description: >-
  A descripton.
---

## The headding {#sec-xyzz}

::: {.run name="nam" fig-alt="A curvee falls." #fig-xyzz}
Captoin of it, with `codee` and $x_{gradiant}$.
:::

A [rankk]{.term key="ranc"} of [@lli2020, sectoin 5], see @fig-abcdef and <https://exampel.org>.[^1]

[^1]: A foootnote. [link](taret.qmd)

  | Header | Colunm |
  | ---    | ---    |
  | celll  | `cde`  |

`chunks = splitt(tensor)`
: One chunnk per rank of float32, GPUs and all-reduce.

```python
cod = wrng
```
"""
RUN = '''\
"""Modul of it."""
# %% [markdown]
# # Titel of it
# A `cod` sentense.

# %% name="x"
x = "strng"  # a commnt


def valu():
    """Says somthing.

    Args:
        xyz: the nubmer.
    """
'''
DRAWING = """\
<svg xmlns="http://www.w3.org/2000/svg"><title>Tytle</title><style>.cls { fil: red }</style>
    <text class="cls">rank <tspan>thrree</tspan> here</text></svg>
"""


def found(folder: Path, name: str, text: str) -> list[tuple[int, str]]:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")
    words = list(spell.strangers(folder))
    assert {file for file, *_ in words} <= {name}
    return [(line, word) for _, line, word, _ in words]


def test_a_page(tmp_path: Path) -> None:
    assert found(tmp_path, "chapters/01-a.qmd", PAGE) == [
        (2, "tytle"),
        (4, "descripton"),
        (7, "headding"),
        (9, "curvee"),
        (10, "Captoin"),
        (13, "rankk"),
        (13, "sectoin"),
        (15, "foootnote"),
        (17, "Colunm"),
        (19, "celll"),
        (22, "chunnk"),
    ]


def test_a_run(tmp_path: Path) -> None:
    words = [(1, "Modul"), (3, "Titel"), (4, "sentense"), (7, "commnt")]
    words += [(11, "somthing"), (13, "Args"), (14, "xyz"), (14, "nubmer")]
    assert found(tmp_path, "runs/01-a.py", RUN) == words


def test_a_drawing(tmp_path: Path) -> None:
    assert found(tmp_path, "vis/a.svg", DRAWING) == [(1, "Tytle"), (2, "thrree")]


@pytest.mark.parametrize("word", ["Gradiants", "behavior", "color", "center", "neighbors’s"])
def test_what_is_wrong(tmp_path: Path, word: str) -> None:
    assert found(tmp_path, "README.md", f"The {word} here.\n") == [(1, word.removesuffix("’s"))]


def test_words_of_the_project_are_known_in_every_form() -> None:
    assert "torchrun" in spell.forms("Torchrun")
    assert "dtype" in spell.forms("Dtypes")
    assert "Vogels" not in spell.forms("vogels")


def test_the_list_of_words_is_sorted() -> None:
    words = spell.WORDS.read_text(encoding="utf-8").splitlines()
    assert words == sorted(set(words), key=lambda word: (word.lower(), word))


def test_a_harper_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "README.md").write_text("Text.\n", encoding="utf-8")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/harper").write_text("#!/bin/sh\necho broken >&2; exit 3\n")
    (tmp_path / "bin/harper").chmod(0o755)
    monkeypatch.setattr(spell.sys, "prefix", str(tmp_path))
    with pytest.raises(SystemExit, match=r"spell\.py: harper failed: broken"):
        list(spell.strangers(tmp_path))
