"""Which code a run exercises, and a digest of each piece.

A run reaches the names of ``miniddp`` that its code cells use, the programs of ``runs/`` and
``stages/`` that it names in a text, and through them every name that those use in turn. The digest
of a symbol sees behaviour: comments, docstrings, line breaks, type hints and the names of local
variables do not count. It is the same under every Python. Everything is read from text: nothing is
imported or executed, and only Python's standard library is needed.
"""

from __future__ import annotations

import ast
import copy
import functools
import hashlib
import re
import symtable
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anywhere

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("miniddp", "finetune", "instruments")
HELPERS = "book"
PROGRAMS = ("runs", "stages")  # folders of files that a run may start
IMPORT_TIME = "<import>"
LAUNCHER = ("torchrun", "")  # no symbol of the project: what a text says that starts ranks

Symbol = tuple[str, str]  # a module and a name in it; a program and ""


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
    marker: str = ""

    @property
    def last_line(self) -> int:
        return self.line + self.source.count("\n")


def run_names(root: Path) -> list[str]:
    """The names of all runs, such as ``05-ring``, in order."""
    return sorted(path.stem for path in (root / "runs").glob("[0-9][0-9]-*.py"))


def cells(source: str, where: str) -> list[Cell]:
    """The cells of a percent-format file, as jupytext reads them."""
    found = []
    kind = "code"
    name = None
    start = 1
    marker = ""
    lines = source.split("\n")
    for number, line in enumerate([*lines, "# %%"], start=1):
        if not re.match(r"# %%(\s|$)", line):
            continue
        cell = _cell(kind, name, lines[start - 1 : number - 1], start, where)
        found.append(replace(cell, marker=marker))
        kind = match[1] if (match := re.search(r"\[(markdown|raw)\]", line)) else "code"
        name = match[1] if (match := re.search(r'\bname="([^"]*)"', line)) else None
        start = number + 1
        marker = line
    if not found[0].source:
        found.pop(0)
    names = [cell.name for cell in found if cell.name]
    if twice := {name for name in names if names.count(name) > 1}:
        raise DigestError(f"{where}: two cells are named {sorted(twice)[0]!r}, expected one")
    return found


def notebook(root: Path, run: str) -> list[Cell]:
    """The cells of a run's notebook: what makes it run anywhere, and those of the run."""
    first = anywhere.of_run(root, run)
    source = (root / "runs" / f"{run}.py").read_text(encoding="utf-8")
    return [
        *([Cell("code", anywhere.NAME, first, 1)] if first else []),
        *cells(source, f"{run}.py"),
    ]


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


# Modules


class Module:
    """The names that one file defines and imports; ``tree`` is its code as far as it acts."""

    def __init__(self, name: str, path: Path, source: str | None = None):
        self.name = name
        self.path = path
        self.source = path.read_text(encoding="utf-8") if source is None else source
        try:
            tree: ast.AST = ast.parse(self.source)
        except SyntaxError as error:
            raise DigestError(
                f"{path.name}, line {error.lineno}: not valid Python: {error.msg}"
            ) from None
        self.is_program = name.endswith(".py")
        if not re.search(r"\b(get_type_hints|__annotations__|singledispatch)\b", self.source):
            tree = _WithoutHints().visit(tree)
        tree = _WithoutLocalNames().visit(tree)
        self.tree: ast.Module = _WithoutProse(self.is_program).visit(tree)
        self.package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        self.imports = self._imports()
        self.definitions: dict[str, list[ast.stmt]] = defaultdict(list)
        for node in self.tree.body:
            if not _is_import(node):
                for bound in bound_names(node) or [IMPORT_TIME]:
                    self.definitions[bound].append(node)

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
        return ".".join(filter(None, [*parts[: len(parts) - node.level + 1], node.module]))

    def nodes(self, name: str) -> list[ast.stmt]:
        """The statements that define a name; all of a program."""
        return self.tree.body if self.is_program else self.definitions[name]

    def names(self) -> list[str]:
        return [name for name in self.definitions if not name.startswith("__")]


@functools.cache
def read_module(name: str, path: Path, _changed: int) -> Module:
    """A module as it was at a time: many runs reach the same ones."""
    return Module(name, path)


def _is_import(node: ast.stmt) -> bool:
    if isinstance(node, ast.If) and ast.unparse(node.test) in (
        "__name__ == '__main__'",
        "TYPE_CHECKING",
        "typing.TYPE_CHECKING",
    ):
        return True
    return isinstance(node, ast.Import | ast.ImportFrom)


def bound_names(node: ast.AST) -> list[str]:
    """The module-level names that a top-level statement binds or changes."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
    names = [part.id for target in targets if target for part in ast.walk(target)
             if isinstance(part, ast.Name)]  # fmt: skip
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler):
            names += bound_names(child)
    return list(dict.fromkeys(names))


class _WithoutProse(ast.NodeTransformer):
    """Drops docstrings, and other strings that stand alone. The cell of a run may show one."""

    def __init__(self, is_run: bool):
        self.is_run = is_run

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_text and not (self.is_run and node.col_offset == 0) else node


class _WithoutHints(ast.NodeTransformer):
    """Drops type hints, but not those that make the fields of a class."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]  # noqa: N815

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        has_fields = bool(node.decorator_list or node.bases or node.keywords)
        body = [
            inner if has_fields and isinstance(inner, ast.AnnAssign) else self.visit(inner)
            for inner in node.body
        ]
        node.body = [inner for inner in body if inner]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.Assign | None:
        if node.value is None:
            return None
        return ast.copy_location(ast.Assign([node.target], self.visit(node.value)), node)


class _WithoutLocalNames(ast.NodeTransformer):
    """Numbers the variables that a function keeps to itself, whatever they are called."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        local = _local_names(node)
        numbers: dict[str, str] = {}
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and inner.id in local:
                inner.id = numbers.setdefault(inner.id, f"<{len(numbers)}>")
            elif isinstance(inner, ast.ExceptHandler) and inner.name in local:
                inner.name = numbers.setdefault(inner.name, f"<{len(numbers)}>")
        return node

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]  # noqa: N815


def _local_names(function: ast.FunctionDef) -> set[str]:
    """Names that are local wherever they stand in the function and in those inside it.

    Not parameters, which a caller may name, nor functions, which a traceback names. None at all
    where the names may be looked up.
    """
    decorators = [inner for part in function.decorator_list for inner in ast.walk(part)]
    others = {inner.id for inner in decorators if isinstance(inner, ast.Name)}
    bare = copy.copy(function)
    bare.decorator_list = []
    module = symtable.symtable(ast.unparse(bare), "<function>", "exec")
    others |= {symbol.get_name() for symbol in module.get_symbols()}
    local = set()
    waiting = module.get_children()
    while waiting:
        scope = waiting.pop()
        waiting += scope.get_children()
        for symbol in scope.get_symbols():
            is_seen = symbol.is_global() or symbol.is_parameter() or symbol.is_imported()
            is_seen |= symbol.is_namespace() or scope.get_type() == "class"
            (others if is_seen else local).add(symbol.get_name())
    return set() if others & {"locals", "vars", "dir", "eval", "exec"} else local - others


def _canonical(node: object) -> object:
    """Nested tuples of a syntax tree, the same for every Python that reads it."""
    if isinstance(node, list):
        return tuple(map(_canonical, node))
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = ((name, value) for name, value in ast.iter_fields(node) if value not in (None, []))
    skipped = ("ctx", "kind", "type_comment")
    inner = ((name, _canonical(value)) for name, value in fields if name not in skipped)
    return (type(node).__name__, *inner)


# What a run reaches


class Project:
    """Follows names through the packages of ``src`` and the programs and helpers of runs."""

    def __init__(self, root: Path):
        self.root = root
        self._modules: dict[str, Module | None] = {}
        self._used: dict[Symbol, list[Symbol]] = {}

    def module(self, name: str) -> Module | None:
        """The project's module, or program, of that name; None for those of others."""
        if name not in self._modules:
            path = next(filter(Path.is_file, self._places(name)), None)
            is_known = path is not None and name != HELPERS
            self._modules[name] = (
                read_module(name, path, path.stat().st_mtime_ns) if is_known else None
            )
        return self._modules[name]

    def _places(self, name: str) -> list[Path]:
        if name.endswith(".py"):
            return [self.root / name]
        parts = name.split(".")
        if parts[0] not in PACKAGES:
            inside = [self.root.joinpath(folder, *parts) for folder in PROGRAMS]
            return [path.with_suffix(".py") for path in inside]
        inside = self.root.joinpath("src", *parts)
        return [inside.with_suffix(".py"), inside / "__init__.py"]

    def reached(self, run: str) -> dict[Symbol, Module]:
        """Every symbol that a run uses, directly or through others, itself too."""
        waiting: list[Symbol] = [(run, "")]
        found: dict[Symbol, Module] = {}
        while waiting:
            symbol = waiting.pop()
            module = self.module(symbol[0])
            if symbol in found or module is None:
                continue
            found[symbol] = module
            waiting += self.uses(symbol)
            if IMPORT_TIME in module.definitions and not module.is_program:
                waiting.append((module.name, IMPORT_TIME))
        return found

    def uses(self, symbol: Symbol) -> list[Symbol]:
        """The project's symbols that stand in the code of one."""
        if symbol not in self._used:
            module = self.module(symbol[0])
            nodes = module.nodes(symbol[1]) if module else []
            self._used[symbol] = [used for node in nodes for used in self.uses_of(module, node)]
        return self._used[symbol]

    def uses_of(self, module: Module, node: ast.AST) -> Iterator[Symbol]:
        if isinstance(node, ast.Attribute | ast.Name) and (chain := dotted(node)):
            yield from self._resolve(module, chain)
            return
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from self._named_in(node.value, module)
        for child in ast.iter_child_nodes(node):
            yield from self.uses_of(module, child)

    def _named_in(self, text: str, user: Module) -> Iterator[Symbol]:
        """The modules and programs that a text, such as a command, starts by name."""
        if "--nproc_per_node" in text or text == "sbatch":
            yield LAUNCHER
        for name in re.findall(rf"\b(?:{'|'.join(PACKAGES)})(?:\.\w+)+", text):
            yield from self._whole(name)
        for name in re.findall(r"\b[\w-]+\.py\b", text):
            for path in (f"{folder}/{name}" for folder in PROGRAMS):
                if name != f"{HELPERS}.py" and path != user.name and self.module(path):
                    yield path, ""

    def _resolve(self, module: Module, chain: list[str]) -> Iterator[Symbol]:
        first, *rest = chain
        if first in module.definitions and not module.is_program:
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
        if attribute == "__file__":
            yield from self._whole(name)
        if attribute.startswith("__") or attribute == IMPORT_TIME:
            return
        if attribute in module.definitions:
            yield name, attribute
        elif attribute in module.imports:
            for behind in module.imports[attribute]:
                yield from self._follow(behind, rest, where, {*seen, target})
        elif self.module(f"{name}.{attribute}"):
            yield from self._follow((f"{name}.{attribute}", None), rest, where, seen)
        else:
            raise DigestError(f"{where}: no {attribute!r} in module {name}")

    def _whole(self, name: str) -> Iterator[Symbol]:
        if module := self.module(name):
            yield from ((name, symbol) for symbol in module.names())


def dotted(node: ast.expr) -> list[str]:
    """``["a", "b", "c"]`` of ``a.b.c``; empty if it does not start with a name."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


# Digests


@dataclass(frozen=True)
class Reach:
    """What a run exercises: the digest of each symbol, and the files."""

    digests: dict[str, str]
    files: list[Path]


def reach(root: Path, run: str) -> Reach:
    project, name = Project(root), f"runs/{run}.py"
    own = project.module(name)
    if not own:
        known = ", ".join(run_names(root)) or "none yet"
        raise DigestError(f"no run named {run!r}: expected one of runs/*.py ({known})")
    reached = project.reached(name)
    code: dict[str, Sequence[ast.AST]] = {":".join(filter(None, symbol)): module.nodes(symbol[1])
            for symbol, module in sorted(reached.items(), key=lambda item: item[0])}  # fmt: skip
    code[name] = own_code(own)
    digests = {name: digest_of(part) for name, part in code.items()}
    return Reach(digests, sorted({module.path for module in reached.values()}))


def symbols(root: Path, run: str) -> dict[str, str]:
    """The digest of every symbol that a run reaches, and of the run's own code cells."""
    return reach(root, run).digests


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


def own_digest(root: Path, run: str) -> str:
    """The digest of a run's own code cells alone."""
    name = f"runs/{run}.py"
    return digest_of(own_code(Module(name, root / name)))


def of_notebook(notebook: dict[str, Any]) -> str:
    """The digest of the code cells that a recording holds, as ``own_digest`` of its run."""
    text = ""
    for cell in notebook["cells"]:
        name = cell["metadata"].get("name")
        if cell["cell_type"] == "code" and name != anywhere.NAME:
            said = f' name="{name}"' if name else ""
            text += f"# %%{said}\n{''.join(cell['source'])}\n"
    return digest_of(own_code(Module("runs/run.py", Path("run.py"), text)))


def own_code(run: Module) -> list[ast.AST]:
    """The code cells of a run, each behind its name."""
    found: list[ast.AST] = []
    for cell in cells(run.source, run.name):
        if cell.kind == "code":
            inside = [n for n in run.tree.body if cell.line <= n.lineno <= cell.last_line]
            found += [ast.Constant(cell.name), ast.Constant(cell.source.endswith(";")), *inside]
    return found


def digest_of(nodes: Iterable[ast.AST]) -> str:
    return hashlib.sha256(repr(_canonical(list(nodes))).encode()).hexdigest()[:16]
