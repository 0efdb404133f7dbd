"""What `typos` reads of pages and drawings: British English where a reader reads, no code."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = """\
---
title: A headding
---

## The sentense {#sec-wich}

::: {.run name="wich" fig-alt="A messge falls."}
Teh caption with `behavior`, [a link](wich.qmd) and @wich-2020.
:::

```python
color = "wich"
```
"""
DRAWING = """\
<svg><title>A lable</title><style>.a { color: wich }</style>
<text class="color">rank <tspan>colour behavior</tspan></text></svg>
"""


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("a.qmd", PAGE, ["headding", "sentense", "messge", "Teh"]),
        ("a.svg", DRAWING, ["lable", "behavior"]),
        ("a.qmd", "The color of an optimizer.\n", ["color"]),
        ("a.py", "color = behavior  # teh optimizer\n", ["teh"]),
    ],
)
def test_what_is_found(tmp_path: Path, name: str, text: str, wanted: list[str]) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / name).write_text(text, encoding="utf-8")
    command = [Path(sys.prefix) / "bin/typos", "--format=brief", name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8")
    assert [line.split("`")[1] for line in done.stdout.splitlines()] == wanted
