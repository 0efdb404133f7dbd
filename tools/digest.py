"""Which code a run exercises, and a digest of each piece.

A run reaches the names of ``miniddp`` that its code cells use, and through them every name of the
package's modules that those use in turn. The digest of a symbol covers its source without
docstrings, comment lines and blank lines, so editing prose does not make a recording stale.
Everything is read from text: nothing is imported or executed, and only Python's standard library
is needed.

    python tools/digest.py 05-ring
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("miniddp", "instruments")
HELPERS = "book"
IMPORT_TIME = "<import>"

Symbol = tuple[str, str]


class DigestError(Exception):
    """A run or a module that cannot be followed; the message says where."""


# Runs and their cells


@dataclass(frozen=True)
class Cell:
    """One cell of a percent-format run; ``line`` is the number of its first source line."""

    kind: str
    name: str | None
    source: str
    line: int

    @property
    def last_line(self) -> int:
        return self.line + self.source.count("\n")


def run_names(root: Path) -> list[str]:
    """The names of all runs, such as ``05-ring``, in order."""
    return sorted(path.stem for path in (root / "runs").glob("[0-9][0-9]-*.py"))


def cells(source: str, where: str) -> list[Cell]:
    """The cells of a percent-format file, as jupytext reads them."""
    found = []
    kind, name, start = "code", None, 1
    lines = source.split("\n")
    for number, line in enumerate([*lines, "# %%"], start=1):
        if not re.match(r"# %%(\s|$)", line):
            continue
        found.append(_cell(kind, name, lines[start - 1 : number - 1], start, where))
        kind = match[1] if (match := re.search(r"\[(markdown|raw)\]", line)) else "code"
        name = match[1] if (match := re.search(r'\bname="([^"]*)"', line)) else None
        start = number + 1
    if lines[:1] == ["# ---"]:
        found[0] = _without_header(found[0])
    if not found[0].source:
        found.pop(0)
    names = [cell.name for cell in found if cell.name]
    if twice := {name for name in names if names.count(name) > 1}:
        raise DigestError(f"{where}: two cells are named {sorted(twice)[0]!r}, expected one")
    return found


def _cell(kind: str, name: str | None, lines: list[str], start: int, where: str) -> Cell:
    while lines and not lines[0].strip():
        lines, start = lines[1:], start + 1
    source = "\n".join(lines).rstrip()
    if kind == "code":
        return Cell(kind, name, source, start)
    for number, line in enumerate(source.splitlines(), start):
        if line.strip() and not line.startswith("#"):
            raise DigestError(f"{where}, line {number}: a line of a {kind} cell must start with #")
    return Cell(kind, name, re.sub(r"(?m)^# ?", "", source), start)


def _without_header(cell: Cell) -> Cell:
    header = re.match(r"# ---\n(?:#.*\n)*?# ---\n*", cell.source + "\n")
    if not header:
        return cell
    source = cell.source[header.end() :]
    return Cell(cell.kind, cell.name, source, cell.line + header[0].count("\n"))


# Modules


class Module:
    """The names that one file defines and imports, and its lines without prose."""

    def __init__(self, name: str, path: Path, is_package: bool = False):
        self.name = name
        self.path = path
        self.source = path.read_text(encoding="utf-8")
        try:
            self.tree = ast.parse(self.source)
        except SyntaxError as error:
            raise DigestError(
                f"{path.name}, line {error.lineno}: not valid Python: {error.msg}"
            ) from None
        self.package = name if is_package else name.rpartition(".")[0]
        self.lines = _without_prose(self.source, self.tree)
        self.imports = self._imports()
        self.definitions, self.statements = self._definitions()

    def text(self, nodes: Iterable[ast.stmt]) -> str:
        """The lines of these statements without prose."""
        kept = []
        for node in nodes:
            decorators = getattr(node, "decorator_list", [])
            first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
            kept += self.between(first, node.end_lineno or first)
        return "\n".join(kept)

    def between(self, first: int, last: int) -> list[str]:
        return [line for line in self.lines[first - 1 : last] if line is not None]

    def _imports(self) -> dict[str, set[tuple[str, str | None]]]:
        found: dict[str, set[tuple[str, str | None]]] = defaultdict(set)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    whole = alias.name if alias.asname else alias.name.partition(".")[0]
                    found[alias.asname or whole].add((whole, None))
            elif isinstance(node, ast.ImportFrom):
                source = self._absolute(node)
                if node.names[0].name == "*" and source.partition(".")[0] in PACKAGES:
                    where = f"{self.path.name}, line {node.lineno}"
                    raise DigestError(f"{where}: import names from {source}, not *")
                for alias in node.names:
                    found[alias.asname or alias.name].add((source, alias.name))
        return found

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.package.split(".")
        base = parts[: len(parts) - node.level + 1]
        return ".".join([*base, *([node.module] if node.module else [])])

    def _definitions(self) -> tuple[dict[str, list[ast.stmt]], list[ast.stmt]]:
        definitions: dict[str, list[ast.stmt]] = defaultdict(list)
        bare = []
        for node in self.tree.body:
            if _is_prose_or_import(node):
                continue
            names = _bound_names(node)
            for name in names:
                definitions[name].append(node)
            if not names:
                bare.append(node)
        return definitions, bare


def _is_prose_or_import(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if isinstance(node, ast.If) and ast.unparse(node.test) in (
        "__name__ == '__main__'",
        "TYPE_CHECKING",
        "typing.TYPE_CHECKING",
    ):
        return True
    return isinstance(node, ast.Import | ast.ImportFrom)


def _bound_names(node: ast.stmt) -> list[str]:
    """The module-level names that a top-level statement binds or changes."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [name for target in targets for name in _target_names(target)]
    inner = (
        child
        for field in ("body", "orelse", "handlers", "finalbody")
        for part in getattr(node, field, [])
        for child in (part.body if isinstance(part, ast.ExceptHandler) else [part])
    )
    return list(dict.fromkeys(name for child in inner for name in _bound_names(child)))


def _target_names(target: ast.expr) -> Iterator[str]:
    if isinstance(target, ast.Tuple | ast.List):
        for element in target.elts:
            yield from _target_names(element)
        return
    while isinstance(target, ast.Attribute | ast.Subscript | ast.Starred):
        target = target.value
    if isinstance(target, ast.Name):
        yield target.id


def _docstrings(tree: ast.AST) -> list[ast.Constant]:
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = node.body[0] if node.body else None
        if (
            isinstance(first, ast.Expr)
            and isinstance(first.value, ast.Constant)
            and isinstance(first.value.value, str)
        ):
            found.append(first.value)
    return found


def _without_prose(source: str, tree: ast.Module) -> list[str | None]:
    """Every line of a file; None where it is a docstring, a comment or blank."""
    lines = [line.encode() for line in source.split("\n")]
    docstrings = _docstrings(tree)
    kept = set()
    for node in ast.walk(tree):
        text = isinstance(node, ast.JoinedStr) or (
            isinstance(node, ast.Constant) and isinstance(node.value, str)
        )
        if text and node not in docstrings:
            kept.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for node in docstrings:
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        before, after = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
        lines[first : last + 1] = [before + after, *[b""] * (last - first)]
    prose = re.compile(rb"\s*(#.*)?$")
    return [
        None if number not in kept and prose.match(line) else line.decode().rstrip()
        for number, line in enumerate(lines, 1)
    ]


# What a run reaches


class Project:
    """Follows names through ``src/miniddp`` and the helper modules beside the runs."""

    def __init__(self, root: Path):
        self.root = root
        self._modules: dict[str, Module | None] = {}

    def module(self, name: str) -> Module | None:
        """The project's module of that name; None for modules of others."""
        if name not in self._modules:
            self._modules[name] = self._load(name)
        return self._modules[name]

    def _load(self, name: str) -> Module | None:
        parts = name.split(".")
        folder = self.root / ("src" if parts[0] in PACKAGES else "runs")
        path = folder.joinpath(*parts).with_suffix(".py")
        if path.is_file() and name != HELPERS:
            return Module(name, path)
        package = folder.joinpath(*parts, "__init__.py")
        return Module(name, package, is_package=True) if package.is_file() else None

    def run(self, name: str) -> Module:
        path = self.root / "runs" / f"{name}.py"
        if not path.is_file():
            known = ", ".join(run_names(self.root)) or "none yet"
            raise DigestError(f"no run named {name!r}: expected one of runs/*.py ({known})")
        return Module(f"runs/{name}.py", path)

    def reached(self, run: Module) -> set[Symbol]:
        """Every symbol that the code of a run uses, directly or through others."""
        waiting = list(self._uses(run, run.tree))
        found: set[Symbol] = set()
        while waiting:
            symbol = waiting.pop()
            if symbol in found:
                continue
            found.add(symbol)
            module = self.module(symbol[0])
            assert module is not None
            nodes = module.statements if symbol[1] == IMPORT_TIME else module.definitions[symbol[1]]
            for node in nodes:
                waiting += self._uses(module, node)
            if module.statements:
                waiting.append((module.name, IMPORT_TIME))
        return found

    def _uses(self, module: Module, node: ast.AST) -> Iterator[Symbol]:
        if isinstance(node, ast.Attribute | ast.Name):
            chain = _dotted(node)
            if chain:
                yield from self._resolve_chain(module, chain)
                return
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for name in re.findall(rf"\b(?:{'|'.join(PACKAGES)})(?:\.\w+)+", node.value):
                if self.module(name):
                    yield from self._whole(name)
        for child in ast.iter_child_nodes(node):
            if not _is_docstring(node, child):
                yield from self._uses(module, child)

    def _resolve_chain(self, module: Module, chain: list[str]) -> Iterator[Symbol]:
        first, *rest = chain
        if first in module.definitions and not module.name.endswith(".py"):
            yield module.name, first
        for target in module.imports.get(first, ()):
            yield from self._follow(target, rest, f"{module.path.name}: {'.'.join(chain)}", set())

    def _follow(
        self,
        target: tuple[str, str | None],
        rest: list[str],
        where: str,
        seen: set[tuple[str, str | None]],
    ) -> Iterator[Symbol]:
        """The symbols behind ``target`` followed by the attributes ``rest``."""
        name, attribute = target
        module = self.module(name)
        if module is None or target in seen:
            return
        if attribute is None:
            if not rest:
                yield from self._whole(name)
                return
            attribute, rest = rest[0], rest[1:]
        if attribute.startswith("__") or attribute == IMPORT_TIME:
            return
        if attribute in module.definitions:
            yield name, attribute
        elif attribute in module.imports:
            for behind in module.imports[attribute]:
                yield from self._follow(behind, rest, where, {*seen, target})
        elif self.module(f"{name}.{attribute}"):
            yield from self._follow((f"{name}.{attribute}", None), rest, where, seen)
        elif lazy := self._lazily_exported(module, attribute):
            yield lazy, attribute
        else:
            raise DigestError(f"{where}: no {attribute!r} in module {name}")

    def _lazily_exported(self, module: Module, name: str) -> str | None:
        if "__getattr__" not in module.definitions:
            return None
        for path in sorted(module.path.parent.glob("*.py")):
            inner = self.module(f"{module.name}.{path.stem}")
            if inner and name in inner.definitions:
                return inner.name
        return None

    def _whole(self, name: str) -> Iterator[Symbol]:
        module = self.module(name)
        if module is None:
            return
        for symbol in module.definitions:
            if not symbol.startswith("__"):
                yield name, symbol
        if module.statements:
            yield name, IMPORT_TIME


def _dotted(node: ast.expr) -> list[str]:
    """``["a", "b", "c"]`` of ``a.b.c``; empty if it does not start with a name."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def _is_docstring(parent: ast.AST, child: ast.AST) -> bool:
    return isinstance(parent, ast.Expr) and isinstance(child, ast.Constant)


# Digests


def symbols(root: Path, run: str) -> dict[str, str]:
    """The digest of every symbol that a run reaches, and of the run's own code cells."""
    project = Project(root)
    own = project.run(run)
    found = {}
    for module_name, name in project.reached(own):
        module = project.module(module_name)
        assert module is not None
        nodes = module.statements if name == IMPORT_TIME else module.definitions[name]
        found[f"{module_name}:{name}"] = _digest(module.text(nodes))
    return {**dict(sorted(found.items())), own.name: _digest(_own_code(own))}


def reached_source(root: Path, run: str) -> dict[Path, str]:
    """The files that a run reaches, each with the text of what it reaches there."""
    project = Project(root)
    own = project.run(run)
    texts = defaultdict(list, {own.path: [_own_code(own)]})
    for module_name, name in sorted(project.reached(own)):
        module = project.module(module_name)
        assert module is not None
        nodes = module.statements if name == IMPORT_TIME else module.definitions[name]
        texts[module.path].append(module.text(nodes))
    return {path: "\n".join(parts) for path, parts in texts.items()}


def differences(recorded: dict[str, str], current: dict[str, str]) -> list[str]:
    """What changed between two results of ``symbols``, one phrase for each symbol."""
    changed = [
        f"{name} changed"
        for name in recorded
        if recorded[name] != current.get(name, recorded[name])
    ]
    removed = [f"{name} is no longer used" for name in recorded if name not in current]
    added = [f"{name} is now used" for name in current if name not in recorded]
    return changed + removed + added


def _own_code(run: Module) -> str:
    lines = []
    for cell in cells(run.source, run.name):
        if cell.kind == "code":
            lines += [f"# %% {cell.name or ''}", *run.between(cell.line, cell.last_line)]
    return "\n".join(lines)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def main(arguments: list[str]) -> int:
    names = arguments or run_names(ROOT)
    try:
        for name in names:
            for symbol, digest in symbols(ROOT, name).items():
                print(f"{digest}  {symbol}")
    except DigestError as error:
        print(f"digest.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
