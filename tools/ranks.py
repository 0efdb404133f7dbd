"""What ran for each cell of a run: its ranks, one process, or nothing but arithmetic.

Read from text: a statement shows what ranks gave if it starts some, or reads a name that such a
statement has set. Its marker says what cannot be read: `# %% name="logs" ranks="3"` of ranks that
left files, and on how many where a run starts several numbers of them; `badge="computed"` of what
is arithmetic.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import digest

STARTS = {("miniddp.launch.ranks", "run_ranks"), ("instruments.programs", "TORCHRUN")}
LAUNCHER = re.compile(r"--nproc_per_node|'sbatch'")
ASKS = ("instruments.backend", "backend_of")  # starts ranks on a GPU, and shows nothing of them
RANKS, PROCESS, COMPUTED = "ranks", "process", "computed"

Claim = str | list[int]  # one of the three, or the numbers of ranks that the marker says


def of_runs(root: Path) -> dict[str, dict[str, Claim]]:
    """By run and cell."""
    project = digest.Project(root)
    return {run: of_run(project, run) for run in digest.run_names(root)}


def problems(claims: dict[str, Claim], sizes: list[int]) -> Iterator[str]:
    """What is wrong with the claims of a run whose provenance() says `sizes`."""
    said = {size for claim in claims.values() if isinstance(claim, list) for size in claim}
    if RANKS in claims.values():
        said |= {*sizes} if len(sizes) == 1 else set()
        for name in (name for name, claim in claims.items() if claim == RANKS and len(sizes) > 1):
            yield f'cell "{name}" shows what ranks gave: its marker needs ranks="…", of {sizes}'
    for size in sorted(said - {*sizes, 1}):
        yield f"a cell claims {size} ranks, and provenance() says {sizes}"
    for size in sorted({*sizes} - said - {1}):
        yield f"provenance() says {size} ranks, and no cell has run them"


def of_run(project: digest.Project, run: str) -> dict[str, Claim]:
    program = project.module(f"runs/{run}.py")
    if not program:
        raise digest.DigestError(f"no run named {run!r}")
    given: set[str] = set()  # names whose values are from ranks
    found: dict[str, Claim] = {}
    any_started = False
    for cell in digest.cells(program.source, f"{run}.py"):
        shows = starts = False
        counts: set[int] = set()
        for node in program.tree.body:
            if not cell.line <= node.lineno <= cell.last_line:
                continue
            started = _starts(project, program, node)
            is_given = started or bool(given & _read(node))
            given.difference_update(digest.bound_names(node))
            given |= _changed(program, node) if is_given else set()
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                counts |= _counts(node)
                starts |= started
                shows |= is_given
        any_started |= starts or shows
        if cell.kind == "code" and cell.name:
            claim = found[cell.name] = _said(cell.marker) or (RANKS if shows else PROCESS)
            where = f'{run}.py, cell "{cell.name}"'
            if claim == COMPUTED and starts:
                raise digest.DigestError(f"{where}: it starts ranks, and claims to be computed")
            if isinstance(claim, list) and not any_started:
                raise digest.DigestError(f"{where}: it claims ranks, and none have been started")
            if isinstance(claim, list) and counts - {*claim}:
                raise digest.DigestError(f"{where}: it starts {max(counts)} ranks, not {claim}")
    return found


def _said(marker: str) -> Claim | None:
    """What the marker of a cell claims, if it does."""
    if 'badge="computed"' in marker:
        return COMPUTED
    said = re.search(r'\branks="([\d ]+)"', marker)
    if not said:
        return None
    return [int(size) for size in said[1].split()] if said[1] != "0" else PROCESS


def _counts(node: ast.AST) -> set[int]:
    """On how many ranks a statement starts a function or program, where that is a number."""
    calls = (call for call in ast.walk(node) if isinstance(call, ast.Call))
    starting = (
        call for call in calls if ast.unparse(call.func).endswith(("run_ranks", "run_torchrun"))
    )
    given = (
        number for call in starting for number in call.args if isinstance(number, ast.Constant)
    )
    return {number.value for number in given if type(number.value) is int}


def _starts(project: digest.Project, program: digest.Module, node: ast.AST) -> bool:
    """Whether a statement starts ranks, itself or through what it uses of the project."""
    seen: set[digest.Symbol] = {ASKS}
    waiting = [*{*project.uses_of(program, node)} - seen]
    while waiting:
        symbol = waiting.pop()
        if symbol in STARTS or _launches(project, symbol):
            return True
        if symbol not in seen:
            seen.add(symbol)
            waiting += project.uses(symbol)
    return bool(LAUNCHER.search(ast.unparse(node)))


@functools.cache
def _launches(project: digest.Project, symbol: digest.Symbol) -> bool:
    module = project.module(symbol[0])
    if not module or symbol[0].startswith("stages/"):  # these are started by what else stands there
        return False
    return bool(LAUNCHER.search("\n".join(map(ast.unparse, module.nodes(symbol[1])))))


def _read(node: ast.AST) -> set[str]:
    """The names that a statement reads, except those that its functions and loops have set."""
    inside = [*ast.walk(node)]
    targets = [inner.target for inner in inside if isinstance(inner, ast.comprehension | ast.For)]
    names = {name.id for target in targets for name in ast.walk(target)
             if isinstance(name, ast.Name)}  # fmt: skip
    names |= {inner.arg for inner in inside if isinstance(inner, ast.arg)}
    read = (
        name for name in inside if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Load)
    )
    return {name.id for name in read} - names


def _changed(program: digest.Module, node: ast.stmt) -> set[str]:
    """The names that a statement sets, and such as `rows` of `rows.append(row)`."""
    calls = (inner.value for inner in ast.walk(node) if isinstance(inner, ast.Expr))
    owners = {name for call in calls if isinstance(call, ast.Call)
              for name in digest.dotted(call.func)[:-1][:1]}  # fmt: skip
    return owners - program.imports.keys() | {*digest.bound_names(node)}
