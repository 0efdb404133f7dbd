"""Quotes of Python source, compared with what Python's own parser says."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import json
import subprocess
import textwrap
from collections import Counter
from pathlib import Path

import pypandoc
import pytest

from quoted import definitions, span

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
EXTENSION = ROOT / "_extensions" / "ddp-book"
OWN = sorted([*ROOT.glob("src/**/*.py"), *ROOT.glob("runs/*.py"), *HERE.glob("fixture/**/*.py")])
STANDARD = [Path(module.__file__) for module in (argparse, ast, dataclasses, functools, textwrap)]


def quotes(path: Path) -> dict[str, str | dict[str, str]]:
    command = [pypandoc.get_pandoc_path(), "lua", HERE / "quote.lua", EXTENSION]
    cases = json.dumps([[path.read_text(encoding="utf-8")]])
    done = subprocess.run(command, input=cases, capture_output=True, encoding="utf-8", timeout=60)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    return found or {}


def without_indent(lines: list[str]) -> list[str]:
    margin = len(lines[0]) - len(lines[0].lstrip())
    cut = [line[margin:] if line[:margin].isspace() else line for line in lines]
    return [line.rstrip() for line in cut]


@pytest.mark.parametrize("path", [*OWN, *STANDARD], ids=lambda path: path.name)
def test_quotes_are_what_python_parses(path):
    text = path.read_text(encoding="utf-8")
    lines, found = text.splitlines(), quotes(path)
    expected = [(name, span(node)) for name, node in definitions(ast.parse(text).body)]
    times = Counter(name for name, _ in expected)
    for name, numbers in expected:
        if times[name] > 1:
            continue
        wanted = without_indent([lines[number - 1] for number in numbers])
        assert found[name].splitlines() == wanted, name
    assert set(found) == set(times)


def test_a_name_that_is_defined_twice_is_ambiguous():
    found = quotes(HERE / "fixture/src/miniddp/ring.py")
    assert found["twice"] == {"problem": "defined more than once (lines 136, 141)"}
    assert found["Ring.next"] == {"problem": "defined more than once (lines 107, 112)"}
