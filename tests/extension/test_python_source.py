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

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EXTENSION = ROOT / "_extensions" / "ddp-book"
OWN = sorted([*ROOT.glob("src/**/*.py"), *ROOT.glob("runs/*.py"), *HERE.glob("fixture/**/*.py")])
STANDARD = [Path(module.__file__) for module in (argparse, ast, dataclasses, functools, textwrap)]


def quotes(path: Path) -> dict[str, str | dict[str, str]]:
    command = [pypandoc.get_pandoc_path(), "lua", HERE / "quote.lua", EXTENSION, path]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) or {}


def definitions(body: list[ast.stmt], prefix: str = ""):
    """Yield (dotted name, first line, last line) of functions, classes and their members."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield prefix + node.name, first, node.end_lineno
            if isinstance(node, ast.ClassDef):
                yield from definitions(node.body, f"{prefix}{node.name}.")
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(target, ast.Name):
            yield prefix + target.id, node.lineno, node.end_lineno
        for inner in ("body", "orelse", "finalbody"):
            yield from definitions(getattr(node, inner, []), prefix)
        for handler in getattr(node, "handlers", []):
            yield from definitions(handler.body, prefix)


def without_indent(lines: list[str]) -> list[str]:
    margin = len(lines[0]) - len(lines[0].lstrip())
    cut = [line[margin:] if line[:margin].isspace() else line for line in lines]
    return [line.rstrip() for line in cut]


@pytest.mark.parametrize("path", [*OWN, *STANDARD], ids=lambda path: path.name)
def test_quotes_are_what_python_parses(path):
    text = path.read_text(encoding="utf-8")
    lines, found = text.splitlines(), quotes(path)
    expected = list(definitions(ast.parse(text).body))
    times = Counter(name for name, _, _ in expected)
    for name, first, last in expected:
        if times[name] > 1:
            continue
        quoted = found[name].splitlines()
        wanted = without_indent(lines[first - 1 : last])
        assert quoted[: len(wanted)] == wanted, name
        # Comments at the end of a block belong to it, which Python's parser does not say.
        assert all(not line or line.lstrip().startswith("#") for line in quoted[len(wanted) :])
    assert set(found) == set(times)


def test_definitions_that_stand_apart_are_ambiguous():
    found = quotes(HERE / "fixture/src/miniddp/ring.py")
    assert found["twice"] == {"problem": "defined more than once (lines 136, 141)"}
