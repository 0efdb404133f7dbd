"""Check the book without executing anything: recordings and chapters.

    python tools/check.py
    python tools/check.py --write-status

A CPU recording that is stale or missing is an error, a GPU recording that is stale is reported.
Needs only Python's standard library.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import arguments
import digest
import quoted
import ranks
import scrub

ROOT = digest.ROOT
KINDS = ("cpu", "gpu")
SHOWN = 6  # changes that are named one by one
STATUS = Path("recordings/status.json")
METADATA: dict[str, type | tuple[type, ...]] = {
    "run": str,
    "kind": str,
    "device": str,
    "device_count": int,
    "world_size": list,
    "backend": list,
    "versions": dict,
    "data": (dict, type(None)),
    "commit": str,
    "date": str,
    "command": str,
    "seconds": (int, float),
    "symbols": dict,
}


class BadRecording(ValueError):  # noqa: N818
    """A file under recordings/ that is not a recording; the message says why."""


class GitError(Exception):
    """A git command that failed, in one line."""


# Freshness


def recording_path(root: Path, run: str, kind: str) -> Path:
    return root / "recordings" / f"{run}.{kind}.ipynb"


def read_recording(path: Path) -> dict[str, Any]:
    """The notebook in a file; BadRecording if it is none or lacks what a recording carries."""
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadRecording(f"there is no recording {path.name}") from None
    except (ValueError, RecursionError):
        raise BadRecording("not a notebook: not JSON") from None
    if not isinstance(notebook, dict) or not notebook.keys() >= {"nbformat", "cells", "metadata"}:
        raise BadRecording("not a notebook")
    metadata = notebook["metadata"]
    carried = metadata.get("miniddp") if isinstance(metadata, dict) else None
    if not isinstance(carried, dict):
        raise BadRecording("no metadata 'miniddp': not made by make record")
    for key, kind in METADATA.items():
        if key not in carried:
            raise BadRecording(f"it lacks the metadata {key!r}")
        if not isinstance(carried[key], kind):
            raise BadRecording(f"metadata {key!r} is {repr(carried[key])[:100]}")
    accepted = carried.get("accepted", [])
    if not isinstance(accepted, list) or not all(
        isinstance(said, dict) and said.keys() >= {"reason", "date", "commit"} for said in accepted
    ):
        raise BadRecording("metadata 'accepted' needs reason, date and commit")
    return notebook


def freshness(
    root: Path, run: str, kind: str, now: dict[str, str] | None = None
) -> tuple[str, list[str]]:
    """``fresh``, ``stale`` or ``missing``, and what differs from the digests of ``now``."""
    try:
        recorded = read_recording(recording_path(root, run, kind))["metadata"]["miniddp"]["symbols"]
    except BadRecording:
        return "missing", []
    changes = digest.differences(recorded, now or digest.symbols(root, run))
    return ("stale" if changes else "fresh"), changes


States = dict[str, dict[str, tuple[str, list[str]]]]  # by run and kind: what `freshness` says
Cells = dict[str, ranks.Claims]  # by run: what ran for each cell


def states(root: Path) -> States:
    runs = {run: digest.symbols(root, run) for run in digest.run_names(root)}
    return {
        run: {kind: freshness(root, run, kind, now) for kind in KINDS} for run, now in runs.items()
    }


def own_code_changed(root: Path, notebook: dict[str, Any]) -> bool:
    carried = notebook["metadata"]["miniddp"]
    own = f"runs/{carried['run']}.py"
    return bool(carried["symbols"].get(own) != digest.own_digest(root, carried["run"]))


def texts_differ(root: Path, run: str, kind: str) -> bool:
    """Whether a recording of the run's code has not the texts that the run has now."""
    try:
        notebook = read_recording(recording_path(root, run, kind))
    except BadRecording:
        return False
    if own_code_changed(root, notebook):
        return False
    now = [(cell.kind, cell.name, cell.source) for cell in digest.notebook(root, run)]
    return now != [
        (cell["cell_type"], cell["metadata"].get("name"), "".join(cell["source"]))
        for cell in notebook["cells"]
    ]


def status_text(found: States, cells: Cells) -> str:
    """By run, what the book's badges say: how fresh it is, and what ran for each cell."""
    said = {run: {kind: kinds[kind][0] for kind in KINDS} for run, kinds in found.items()}
    return json.dumps({run: said[run] | {"cells": cells[run]} for run in said}, indent=2) + "\n"


def write_status(root: Path) -> None:
    unfinished = root / f"{STATUS}.unfinished"
    unfinished.parent.mkdir(exist_ok=True)
    unfinished.write_text(status_text(states(root), ranks.of_runs(root)), encoding="utf-8")
    unfinished.replace(root / STATUS)


def report(found: States) -> Iterator[str]:
    """One line per run: how fresh its recordings are."""
    width = max(map(len, found), default=0)
    for run, kinds in found.items():
        said = "  ".join(f"{kind.upper()} {kinds[kind][0]:<7}" for kind in KINDS)
        changes = f"  GPU: {', '.join(kinds['gpu'][1])}" if kinds["gpu"][1] else ""
        yield f"{run:<{width}}  {said}{changes}".rstrip()


def freshness_problems(root: Path, found: States, cells: Cells) -> Iterator[str]:
    """Stale or missing CPU recordings; else a status file that does not say how they are."""
    for run, kinds in found.items():
        state, changes = kinds["cpu"]
        if state != "fresh":
            more = f", and {len(changes) - SHOWN} more" if len(changes) > SHOWN else ""
            why = f": {', '.join(changes[:SHOWN])}{more}" if changes else ""
            yield f"recordings/{run}.cpu.ipynb is {state}{why} (make record RUN={run})"
        for kind in KINDS:
            if texts_differ(root, run, kind):
                fix = f"make prose RUN={run}" + (" KIND=gpu" if kind == "gpu" else "")
                yield f"recordings/{run}.{kind}.ipynb lacks the latest texts of its run ({fix})"
    file = root / STATUS
    is_true = file.is_file() and file.read_text(encoding="utf-8") == status_text(found, cells)
    if not is_true and all(kinds["cpu"][0] == "fresh" for kinds in found.values()):
        yield f"{STATUS} is out of date (python tools/check.py --write-status)"


# Recordings


def recordings(root: Path) -> list[Path]:
    return sorted((root / "recordings").glob("*.ipynb"))


def recording_problems(root: Path) -> Iterator[str]:
    known = history(root)
    for path in recordings(root):
        yield from (f"recordings/{path.name}: {problem}" for problem in problems(root, path, known))


def claim_problems(root: Path, found: States, cells: Cells) -> Iterator[str]:
    """Cells that claim other ranks than their run has started."""
    for run, claims in cells.items():
        if found[run]["cpu"][0] == "fresh":
            recording = read_recording(recording_path(root, run, "cpu"))
            sizes = recording["metadata"]["miniddp"]["world_size"]
            yield from (f"runs/{run}.py: {problem}" for problem in ranks.problems(claims, sizes))


def problems(root: Path, path: Path, known: set[str] | None) -> Iterator[str]:
    """What is wrong with a recording; ``known`` are the commits that led to the present one."""
    try:
        notebook = read_recording(path)
    except BadRecording as error:
        yield str(error)
        return
    carried = notebook["metadata"]["miniddp"]
    if path.name != f"{carried['run']}.{carried['kind']}.ipynb":
        yield f"it says that it is {carried['run']} on {carried['kind']}"
    if carried["run"] not in digest.run_names(root):
        yield f"it has no run: runs/{carried['run']}.py does not exist"
    if not re.fullmatch(r"[0-9a-f]{40}", carried["commit"]):
        yield f"commit is {carried['commit']!r}, expected 40 hex digits"
    elif lost := lost_commit(carried, known):
        yield lost
    yield from cell_problems(notebook)
    yield from (f"it holds {trace}" for trace in machine_traces(notebook))


def has_git(root: Path) -> bool:
    return bool(shutil.which("git")) and (root / ".git").exists()


def git(root: Path, *command: str) -> str:
    done = subprocess.run(["git", "-C", root, *command], capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise GitError(f"git {command[0]} failed: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout


def history(root: Path) -> set[str] | None:
    """The commits that led to this one; None where git cannot tell: no clone, or a shallow one."""
    if not has_git(root) or git(root, "rev-parse", "--is-shallow-repository").strip() == "true":
        return None
    return set(git(root, "rev-list", "HEAD").split())


def lost_commit(carried: dict[str, Any], known: set[str] | None) -> str | None:
    """What is wrong when no commit that a recording names led to the present one."""
    accepted = [said["commit"] for said in carried.get("accepted", [])]
    if known is None or known & {carried["commit"], *accepted}:
        return None
    return (
        f"commit {carried['commit'][:7]} is not in the history of this branch (after a squash or "
        "a rebase: tools/record.py --accept)"
    )


def cell_problems(notebook: dict[str, Any]) -> Iterator[str]:
    identities = [cell.get("id") for cell in notebook["cells"]]
    if None in identities or len(set(identities)) != len(identities):
        yield "cells need ids, each once"
    for cell in notebook["cells"]:
        if cell.get("cell_type") != "code":
            continue
        if cell.get("execution_count") is None and "".join(cell.get("source", "")).strip():
            yield f"{cell.get('id')} was not executed"
        if any(output.get("output_type") == "error" for output in cell.get("outputs", [])):
            yield f"{cell.get('id')} ended in an error"


def machine_traces(notebook: dict[str, Any]) -> list[str]:
    """Paths, addresses and terminal codes of one machine that a notebook still holds."""
    found = []
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            for mime, data in {"text": output.get("text", ""), **output.get("data", {})}.items():
                if mime.startswith("image/") and "svg" not in mime:
                    continue
                found += [f"{trace!r} in {cell.get('id')}" for text in _strings(data)
                          for trace in scrub.leaks(text, "svg" in mime)]  # fmt: skip
    for text in _strings(dict(notebook["metadata"].get("miniddp", {}))):
        found += [f"{trace!r} in its metadata" for trace in scrub.HOME.findall(text)]
    return found


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)


# The book


def page_problems(root: Path) -> Iterator[str]:
    """Pages that _quarto.yml or their run says otherwise of."""
    yield from quoted.listing_problems(root)
    for run in digest.run_names(root):
        page = root / "runs" / f"{run}.qmd"
        if not page.exists():
            yield f"runs/{run}.py has no page runs/{run}.qmd (make record RUN={run} writes it)"
        elif page.read_text(encoding="utf-8") != page_text(root, run):
            yield f"runs/{run}.qmd is not the page of its run (make prose RUN={run} writes it)"


def page_text(root: Path, run: str) -> str:
    """The page that shows a run, under the first heading of the run."""
    heading = re.search(r"(?m)^# # (.+)", (root / "runs" / f"{run}.py").read_text(encoding="utf-8"))
    title = f"Run {run}: {heading[1]}" if heading else f"Run {run}"
    return (
        f"---\ntitle: {json.dumps(title, ensure_ascii=False)}\n"
        'description: "The executed notebook behind the outputs of this run, with its provenance."'
        f'\n---\n\n::: {{.notebook name="{run}"}}\n:::\n'
    )


def chapter_problems(root: Path) -> Iterator[str]:
    """Executable cells."""
    for path in quoted.pages(root):
        name = path.relative_to(root).as_posix()
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
            if match := re.match(r"\s*[`~]{3,}\s*\{([A-Za-z]\w*)", line):
                yield f"{name}, line {number}: executable cell {{{match[1]}}}; quote a run instead"


def uncited(root: Path) -> Iterator[str]:
    """Entries of the bibliography that no page cites."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in quoted.pages(root))
    for file in root.glob("*.bib"):
        for key in re.findall(r"(?m)^\s*@\w+\s*\{\s*([^\s,]+)", file.read_text(encoding="utf-8")):
            if not re.search(rf"@\{{?{re.escape(key)}(?![\w-])", text):
                yield f"@{key} stands in the bibliography, and no page cites it"


UNITS = (
    r"[GMk]i?B/s|Gbit/s|ms|[µμ]s|us|ns|s|seconds?|minutes?|hours?|%|percent|×(?!\s*[\d$])"
    r"|(?:tokens|samples|steps)/s(?:/GPU)?|TFLOPS?(?:/s)?|times (?:as fast|faster|slower)"
)
TYPED_NUMBER = re.compile(rf"(?<![\w.,@/-])\d(?:[\d.,]*\d)?[\s\u00a0]?(?:{UNITS})(?![\w/])")


def typed_numbers(root: Path) -> Iterator[str]:
    """Numbers with a measured unit that prose states without a recording or a citation."""
    for path in quoted.pages(root):
        name = path.relative_to(root).as_posix()
        for number, text in prose(path.read_text(encoding="utf-8")):
            for match in TYPED_NUMBER.finditer(text):
                line = number + text.count("\n", 0, match.start())
                found = " ".join(match[0].split())
                yield f"{name}, line {line}: {found!r} is typed by hand; quote a run or cite"


UNREAD = (  # front matter, comments, code, formulas, spans with attributes
    r"\A---\n.*?\n---\n",
    r"<!--.*?-->",
    r"(?m)^(\s*)(`{3,}|~{3,})[^\n]*\n(?:.*?\n)??\1\2[`~]*[ \t]*$",
    r"\$\$.*?\$\$(?:\s*\{[^}]*\})?",
    r"(`+)[^`].*?\1",
    r"\$[^$\n]+\$",
    r"\[[^\]\n]*\]\{[^}]*\}",
)


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Paragraphs and tables without citations, with the number of their first line.

    Left out: exercises, and what is not read. Newlines
    stay, so that line numbers can be counted.
    """
    for pattern in UNREAD:
        text = re.sub(pattern, lambda match: re.sub(r"[^\n]", " ", match[0]), text, flags=re.DOTALL)
    lines = [
        "" if skipped or re.match(r"\s*:::", line) else line
        for skipped, line in in_exercises(text.split("\n"))
    ]
    for number, (before, after) in enumerate(zip(lines, lines[2:], strict=False), 1):
        if not lines[number].strip() and re.match(r"\s*\|", before) and re.match(r"\s*: ", after):
            lines[number] = "|"  # a table and its caption are one
    start = 0
    for number, line in enumerate([*lines, ""]):
        if line.strip():
            continue
        paragraph = "\n".join(lines[start:number])
        if paragraph.strip() and not is_cited(paragraph):
            yield start + 1, paragraph
        start = number + 1


def is_cited(paragraph: str) -> bool:
    """Whether it cites the bibliography, or links to where it has its numbers from."""
    return bool(re.search(r"\]\(http|(?<![\w\\])@(?!(?:fig|tbl|sec|eq|lst)-)[A-Za-z]", paragraph))


def in_exercises(lines: list[str]) -> Iterator[tuple[bool, str]]:
    """Each line, and whether it stands in an exercise or an answer."""
    divs: list[str] = []
    for line in lines:
        div = re.match(r"\s*:{3,}\s*(.*)", line)
        if div and div[1].strip(" :"):
            divs.append(div[1])
        elif div and divs:
            divs.pop()
        yield any(re.search(r"\b(exercise|answer)\b", div) for div in divs), line


# Command line


def main(given: list[str], root: Path = ROOT) -> int:
    parser = arguments.Parser(__doc__)
    parser.add_argument("--write-status", action="store_true", help=f"write {STATUS}")
    options = parser.parse_args(given)
    try:
        if options.write_status:
            write_status(root)
        found = states(root)
        cells = ranks.of_runs(root)
        print("\n".join(report(found)))
        errors = [
            *freshness_problems(root, found, cells),
            *recording_problems(root),
            *claim_problems(root, found, cells),
            *page_problems(root),
            *chapter_problems(root),
            *quoted.broken(root),
            *quoted.unquoted(root),
        ]
        warnings = [*typed_numbers(root), *uncited(root)]
    except (digest.DigestError, GitError, OSError) as error:
        print(f"check.py: {error}", file=sys.stderr)
        return 1
    if history(root) is None:
        print("note: no git history here, so the commits of the recordings are not checked")
    for warning in warnings:
        print(f"warning: {warning}")
    for problem in errors:
        print(f"error: {problem}")
    print(f"{len(errors)} errors, {len(warnings)} warnings")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
