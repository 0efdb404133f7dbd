"""Which lines of the learner's path no chapter quotes."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

PATH = ("replicate", "naive", "bucket", "ddp", "ring", "sampler", "accumulation")
QUOTE = re.compile(r"^:{3,} *\{\.code\s([^{}]*)\}", re.MULTILINE)
ATTRIBUTE = re.compile(r'([\w-]+)="([^"]*)"')
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
           tokenize.ENDMARKER}  # fmt: skip


def unquoted(root: Path) -> Iterator[str]:
    """Stretches of code of the learner's path that neither index.qmd nor a chapter quotes."""
    quotes = list(attributes_of_quotes(root))
    for module in PATH:
        name = f"src/miniddp/{module}.py"
        text = (root / name).read_text(encoding="utf-8")
        seen = [lines_of(text, quote) for quote in quotes if quotes_file(quote, name)]
        for first, last in stretches(code_lines(text), set().union(*seen)):
            place = f"line {first}" if first == last else f"lines {first} to {last}"
            start = text.splitlines()[first - 1].strip()
            yield f"{name}, {place}: no chapter quotes `{start}`"


def attributes_of_quotes(root: Path) -> Iterator[dict[str, str]]:
    for page in [root / "index.qmd", *sorted((root / "chapters").glob("*.qmd"))]:
        for given in QUOTE.findall(page.read_text(encoding="utf-8")):
            yield dict(ATTRIBUTE.findall(given))


def quotes_file(quote: dict[str, str], name: str) -> bool:
    module = quote.get("symbol", "").partition(":")[0].replace(".", "/")
    return quote.get("file", f"src/{module}.py") == name


def definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.stmt]]:
    """Functions, classes, values and their members, each with its dotted name."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from definitions(node.body, f"{prefix}{node.name}.")
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(target, ast.Name):
            yield prefix + target.id, node
        for inner in ("body", "orelse", "finalbody"):
            yield from definitions(getattr(node, inner, []), prefix)
        for handler in getattr(node, "handlers", []):
            yield from definitions(handler.body, prefix)


def lines_of(text: str, quote: dict[str, str]) -> set[int]:
    """The numbers of the lines that a quote shows."""
    wanted = quote.get("symbol", "").rpartition(":")[2]
    if not wanted:
        return set(range(1, text.count("\n") + 2))
    found = [(name, node) for name, node in definitions(ast.parse(text).body)]
    if "members" not in quote:
        return {line for name, node in found if name == wanted for line in span(node)}
    members = {f"{wanted}.{member}" for member in quote["members"].split()}
    heads = [head(node) for name, node in found if name == wanted]
    return set().union(*heads, *[span(node) for name, node in found if name in members])


def span(node: ast.stmt) -> range:
    """The lines of a statement, with its decorators."""
    first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
    return range(first, (node.end_lineno or node.lineno) + 1)


def head(node: ast.stmt) -> range:
    """The lines of a class before its body."""
    return range(span(node).start, node.body[0].lineno if isinstance(node, ast.ClassDef) else 0)


def code_lines(text: str) -> set[int]:
    """Lines that say something to be understood: no import, no docstring, no comment by itself."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {line for token in tokens if token.type not in NO_CODE
             for line in range(token.start[0], token.end[0] + 1)}  # fmt: skip
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt) and is_no_code(node):
            lines -= set(span(node))
    return lines


def is_no_code(node: ast.stmt) -> bool:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.Assign):
        return isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__"
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def stretches(code: set[int], seen: set[int]) -> Iterator[tuple[int, int]]:
    """First and last lines of what is not seen; a stretch ends at a line of code that is."""
    first = last = 0
    for line in sorted(code):
        if line in seen:
            if first:
                yield first, last
            first = 0
        else:
            first, last = first or line, line
    if first:
        yield first, last
