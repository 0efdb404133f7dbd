"""On how many ranks that ran was made what a cell of a run shows, read from text.

A statement shows what ranks gave if it starts some, or reads a name that such a statement has set.
Its marker says what cannot be read: `# %% name="logs" ranks="3"` where ranks have left files, or
where a run starts several numbers of them, and `badge="computed"` of what is arithmetic.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import digest

STARTS = {("miniddp.launch.ranks", "run_ranks"), ("instruments.programs", "TORCHRUN"),
          digest.LAUNCHER}  # fmt: skip
ASKS = ("instruments.backend", "backend_of")  # starts ranks on a GPU, and shows nothing of them
NONE, ALL, COMPUTED = "0", "all", "computed"

Claims = dict[str, str]  # by cell: one of the three, or numbers of ranks, such as "2 5"


def of_runs(root: Path) -> dict[str, Claims]:
    project = digest.Project(root)
    return {run: of_run(project, run) for run in digest.run_names(root)}


def problems(claims: Claims, sizes: list[int]) -> Iterator[str]:
    """What is wrong with the claims of a run whose provenance() says `sizes`."""
    said = {int(size) for claim in claims.values() for size in re.findall(r"\d+", claim)} - {0}
    for name, claim in claims.items():
        if claim == ALL and len(sizes) > 1:
            yield f'cell "{name}" shows what ranks gave: its marker needs ranks="…", of {sizes}'
        elif claim == ALL:
            said |= {*sizes}
    for size in sorted(said - {*sizes, 1}):
        yield f"a cell claims {size} ranks, and provenance() says {sizes}"
    for size in sorted({*sizes} - said - {1}):
        yield f"provenance() says {size} ranks, and no cell has run them"


def of_run(project: digest.Project, run: str) -> Claims:
    """Raises DigestError where the code does not bear out a marker."""
    program = project.module(f"runs/{run}.py")
    assert program, run
    given: set[str] = set()  # names whose values are from ranks
    claims: Claims = {}
    any_started = False
    for cell in digest.cells(program.source, f"{run}.py"):
        starts = shows = False
        for node in program.tree.body:
            if not cell.line <= node.lineno <= cell.last_line:
                continue
            started = _starts(project, program, node)
            is_given = started or bool(given & _read(node))
            given.difference_update(digest.bound_names(node))
            given |= _changed(program, node) if is_given else set()
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                starts |= started
                shows |= is_given
        any_started |= shows
        if cell.kind == "code" and cell.name:
            claim = _marked(cell) or (ALL if shows else NONE)
            claims[cell.name] = claim
            if starts and claim == COMPUTED:
                raise digest.DigestError(f'{run}.py: "{cell.name}" is computed, and starts ranks')
            if not any_started and claim not in (NONE, COMPUTED):
                raise digest.DigestError(f'{run}.py: "{cell.name}" claims ranks, and none started')
    return claims


def _marked(cell: digest.Cell) -> str | None:
    """What the marker of a cell claims."""
    found = re.search(r'\b(?:ranks|badge)="([\d ]+|computed)"', cell.marker)
    return found[1] if found else None


def _starts(project: digest.Project, program: digest.Module, node: ast.AST) -> bool:
    """Whether a statement starts ranks, itself or through what it uses of the project."""
    seen: set[digest.Symbol] = {ASKS}
    waiting = {*project.uses_of(program, node)} - seen
    while waiting:
        if waiting & STARTS:
            return True
        seen |= waiting
        waiting = {used for symbol in waiting for used in project.uses(symbol)} - seen
    return False


def _read(node: ast.AST) -> set[str]:
    """The names that a statement reads, except those that its functions and loops have set."""
    inside = [*ast.walk(node)]
    targets = [inner.target for inner in inside if isinstance(inner, ast.comprehension | ast.For)]
    names = {inner.id for target in targets for inner in ast.walk(target)
             if isinstance(inner, ast.Name)}  # fmt: skip
    names |= {inner.arg for inner in inside if isinstance(inner, ast.arg)}
    read = [
        name for name in inside if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Load)
    ]
    return {name.id for name in read} - names


def _changed(program: digest.Module, node: ast.stmt) -> set[str]:
    """The names that a statement sets, and such as `rows` of `rows.append(row)`."""
    calls = [inner.value for inner in ast.walk(node) if isinstance(inner, ast.Expr)]
    owners = {name for call in calls if isinstance(call, ast.Call)
              for name in digest.dotted(call.func)[:-1][:1]}  # fmt: skip
    return owners - program.imports.keys() | {*digest.bound_names(node)}
