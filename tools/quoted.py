"""What pages quote of the code: quotes of what is not there, and lines that no chapter quotes.

    python tools/quoted.py

What is not there is said in the words of the build, which stops at it. Needs only Python's
standard library.
"""

from __future__ import annotations

import ast
import io
import itertools
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PATH = ("replicate", "naive", "bucket", "ddp/wrapper", "ddp/reducer", "ring", "sampler",
        "accumulation")  # fmt: skip
QUOTE = re.compile(r"^:{3,} *\{\.(code|diff)\s([^{}]*)\}\n(.*?)^:{3,} *$", re.MULTILINE | re.DOTALL)
ATTRIBUTE = re.compile(r'([\w-]+)="([^"]*)"')
NOTE = re.compile(r"^(`.*`)\n+:\s", re.MULTILINE)
DEFINITION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
           tokenize.ENDMARKER}  # fmt: skip


@dataclass(frozen=True)
class Quote:
    page: str
    line: int
    kind: str  # "code" or "diff"
    attributes: str  # as they are written
    notes: list[list[str]]  # of each the line that it explains, behind lines to know it by

    def __getitem__(self, name: str) -> str:
        return dict(ATTRIBUTE.findall(self.attributes)).get(name, "")

    @property
    def file(self) -> str:
        return self["file"] or f"src/{self['symbol'].partition(':')[0].replace('.', '/')}.py"

    @property
    def symbol(self) -> str:
        return self["symbol"].rpartition(":")[2]

    @property
    def members(self) -> list[str]:
        return [f"{self.symbol}.{member}" for member in self["members"].split()]


def pages(root: Path) -> list[Path]:
    folders = [sorted((root / name).glob("*.qmd")) for name in ("chapters", "appendix", "runs")]
    return [*root.glob("index.qmd"), *itertools.chain(*folders)]


def listing_problems(root: Path) -> Iterator[str]:
    """Pages that are listed and absent, or present and not listed."""
    text = (root / "_quarto.yml").read_text(encoding="utf-8")
    listed = re.findall(r"(?m)^[^#\n]*?(\w[\w./-]*\.qmd)\b", text)
    here = [path.relative_to(root).as_posix() for path in pages(root)]
    for name in listed:
        if name not in here:
            yield f"_quarto.yml names {name}, which does not exist"
    for name in here:
        if name not in listed:
            yield f"{name} is not listed in _quarto.yml"


def quotes(root: Path) -> Iterator[Quote]:
    for path in pages(root):
        text = path.read_text(encoding="utf-8")
        for match in QUOTE.finditer(text):
            notes = [re.findall(r"`+(.+?)`+", lines) for lines in NOTE.findall(match[3])]
            line = text.count("\n", 0, match.start()) + 1
            yield Quote(path.relative_to(root).as_posix(), line, match[1], match[2], notes)


def broken(root: Path) -> Iterator[str]:
    """Quotes of a file or a symbol, and notes on a line, that are not there."""
    for quote in quotes(root):
        problems_of = code_problems if quote.kind == "code" else diff_problems
        attributes = " ".join(quote.attributes.split())
        for problem in problems_of(root, quote):
            yield f"{quote.page}:{quote.line}: .{quote.kind} {attributes}: {problem}"


def code_problems(root: Path, quote: Quote) -> Iterator[str]:
    if not (root / quote.file).is_file():
        yield f"there is no {quote.file}"
        return
    text = (root / quote.file).read_text(encoding="utf-8")
    if quote.symbol:
        names = [name for name, _ in definitions(ast.parse(text).body)]
        gone = [name for name in (quote.symbol, *quote.members) if name not in names]
        if gone:
            yield f"no such symbol in {quote.file}: {gone[0]}"
            return
    numbers = lines_of(text, quote)
    lines = [line.strip() for number, line in enumerate(text.splitlines(), 1) if number in numbers]
    lines = [line for line in lines if line]
    for note in quote.notes:
        parts = [lines[start : start + len(note)] for start in range(len(lines))]
        count = parts.count([line.strip() for line in note])
        if count != 1:
            found = f"{count} lines read" if count else "no line"
            yield f"{found} `{note[-1].strip()}` in the quoted part of {quote.file}"


def diff_problems(root: Path, quote: Quote) -> Iterator[str]:
    lines = {}
    for sign, name in (("-", quote["from"]), ("+", quote["to"])):
        if not (root / name).is_file():
            yield f"no such file: {name}"
            return
        text = (root / name).read_text(encoding="utf-8")
        lines[sign] = {line.strip() for line in text.splitlines()}
    for *_, line in quote.notes:
        sign, _, changed = line.partition(" ")
        if changed not in lines[sign] if sign in lines else line not in lines["+"]:
            yield f"no line `{line}` in what changes from {quote['from']} to {quote['to']}"


def unquoted(root: Path) -> Iterator[str]:
    """Stretches of the learner's path that no chapter, nor the page inside the class, quotes."""
    found = [q for q in quotes(root) if q.page.startswith(("index", "chapters", "appendix/inside"))]
    for module in PATH:
        name = f"src/miniddp/{module}.py"
        text = (root / name).read_text(encoding="utf-8")
        seen = set().union(*[lines_of(text, quote) for quote in found if quote.file == name])
        for is_seen, stretch in itertools.groupby(sorted(code_lines(text)), seen.__contains__):
            first, *others = stretch
            place = f"lines {first} to {others[-1]}" if others else f"line {first}"
            if not is_seen:
                start = text.splitlines()[first - 1].strip()
                yield f"{name}, {place}: no chapter quotes `{start}`"


def definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.stmt]]:
    """Functions, classes, values and their members, each with its dotted name."""
    for node in body:
        if isinstance(node, DEFINITION):
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


def lines_of(text: str, quote: Quote) -> set[int]:
    """The numbers of the lines that a quote shows."""
    if not quote.symbol:
        return set(range(1, text.count("\n") + 2))
    found = [(name, node) for name, node in definitions(ast.parse(text).body)]
    symbol = [node for name, node in found if name == quote.symbol]
    members = [span(node) for name, node in found if name in quote.members]
    lines = set().union(*map(head if quote.members else span, symbol), *members)
    without = [
        node.body[0]
        for node in symbol
        if quote["docstring"] == "no" and isinstance(node, DEFINITION)
    ]
    return lines.difference(*[span(node) for node in without if is_no_code(node)])


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


if __name__ == "__main__":
    problems = list(broken(ROOT))
    print("\n".join(problems), end="\n" if problems else "")
    sys.exit(bool(problems))
