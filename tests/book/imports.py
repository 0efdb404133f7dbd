"""Which file of `src` imports which: `python -m tests.book.imports` draws it."""

from __future__ import annotations

import ast
from pathlib import Path

SRC = Path(__file__).parents[2] / "src"
Imports = dict[str, set[str]]
"""For each module those that it imports."""


def module_name(path: Path, src: Path) -> str:
    """`miniddp.ddp` for `miniddp/ddp/__init__.py`."""
    return ".".join(path.relative_to(src).with_suffix("").parts).removesuffix(".__init__")


def imported_names(path: Path, src: Path) -> set[str]:
    """The dotted names of all that a file imports, also late ones within its functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            folder = path.parents[node.level - 1] if node.level else src
            base = [*folder.relative_to(src).parts, *filter(None, [node.module])]
            names |= {".".join([*base, alias.name]) for alias in node.names}
    return names


def defining_module(name: str, modules: set[str]) -> str | None:
    """`miniddp.ring` for `miniddp.ring.all_reduce`; None for what is not of these modules."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


def read_imports(src: Path) -> Imports:
    paths = {module_name(path, src): path for path in src.rglob("*.py")}
    modules = set(paths)
    imports = {}
    for module, path in paths.items():
        found = {defining_module(name, modules) for name in imported_names(path, src)}
        imports[module] = found - {None, module}
    return imports


def circle(imports: Imports) -> list[str]:
    """Modules each of which imports the next, the first one being the last; empty if none do."""
    without_circle: set[str] = set()

    def follow(path: list[str]) -> list[str]:
        *before, module = path
        if module in before:
            return path[before.index(module) :]
        if module in without_circle:
            return []
        for imported in sorted(imports[module]):
            if found := follow([*path, imported]):
                return found
        without_circle.add(module)
        return []

    return next(filter(None, (follow([module]) for module in sorted(imports))), [])


if __name__ == "__main__":
    print("flowchart BT")
    for module, imported in sorted(read_imports(SRC).items()):
        for name in sorted(imported):
            print(f"  {name} --> {module}")
