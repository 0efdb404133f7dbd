"""Write the book's API reference, chapters/reference.qmd, from the docstrings of src/miniddp.

    python tools/reference.py

Griffe reads the source without importing it, so this needs neither torch nor a GPU. The page is
committed: who builds the site needs no griffe.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import griffe

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "chapters" / "reference.qmd"
LINE = 88  # a signature longer than this has a line for each parameter
PARTS = {
    "Ranks": ("", "process launch agree clock"),
    "Replicas and gradients": (
        "",
        "replicate naive ring ddp reducer bucket hooks timeline accumulation",
    ),
    "Data and model": ("", "sampler data model batches"),
    "Training": (
        "The script of chapter 9 and what it is made of.",
        "train options training_step schedule checkpoint resume report scalars",
    ),
    "Measuring": ("", "profiling trace breakdown families flops bench_ddp bench_ring"),
    "Models of cost": ("Pure functions: nothing is sent.", "cost overlap memory learning_rate"),
    "After DDP": ("", "sharded_optimizer fully_sharded flat"),
}
INSIDE = "arguments command_line gradient_hooks intervals random_state state_file worker zero"

HEADER = """\
---
title: API reference
description: >-
  The public names of miniddp, from their docstrings.
link-terms: true
---

<!-- Written by tools/reference.py out of src/miniddp. Do not edit it: make reference -->

Every public name that has a docstring, module by module, in the order in which the book needs it.

"""

Named = griffe.Class | griffe.Function | griffe.Attribute


class IncompleteError(Exception):
    """What stopped the tool, in one line."""


def main() -> int:
    try:
        text = page(ROOT)
    except IncompleteError as error:
        print(f"reference.py: {error}", file=sys.stderr)
        return 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


def page(root: Path) -> str:
    """The text of the reference."""
    package = load(root)
    check_complete(package)
    address = repository(root)
    blocks = [HEADER + top_names(package)]
    for part, (about, modules) in PARTS.items():
        blocks.append(f"## {part} {{#{identifier(part)}}}")
        if about:
            blocks.append(about)
        for name in modules.split():
            blocks += module_blocks(package.modules[name], address)
    blocks.append("## Inside {#inside}")
    blocks.append("Modules that the others are made of. Read them in the source.")
    blocks.append(
        "\n".join(f"- {inside(package.modules[name], address)}" for name in INSIDE.split())
    )
    return "\n\n".join(blocks) + "\n"


def load(root: Path) -> griffe.Module:
    package = griffe.load(
        "miniddp", search_paths=[root / "src"], docstring_parser="google", allow_inspection=False
    )
    assert isinstance(package, griffe.Module)
    return package


def check_complete(package: griffe.Module) -> None:
    listed = [name for _, names in PARTS.values() for name in names.split()] + INSIDE.split()
    for name in sorted(set(package.modules) | set(listed)):
        if listed.count(name) > 1:
            raise IncompleteError(f"miniddp.{name} is in two parts of the reference")
        if name not in listed:
            raise IncompleteError(f"miniddp.{name} is in no part: add it to PARTS or INSIDE")
        if name not in package.modules:
            raise IncompleteError(f"there is no miniddp.{name}: take it out of PARTS and INSIDE")


def repository(root: Path) -> str:
    config = (root / "_quarto.yml").read_text(encoding="utf-8")
    match = re.search(r"^\s*repo-url:\s*(\S+)", config, re.MULTILINE)
    if not match:
        raise IncompleteError("_quarto.yml has no repo-url: where is the source?")
    return f"{match[1]}/blob/main"


# Which names


def documented(owner: griffe.Module | griffe.Class) -> Iterator[Named]:
    """The public names with a docstring, in the order of the source."""
    members = [each for each in owner.members.values() if not each.is_alias]
    for member in sorted(members, key=lambda each: each.lineno or 0):
        public = member.is_public and not member.is_module
        if public and (member.has_docstring or callable_of(member)):
            yield member


def callable_of(member: griffe.Object) -> griffe.Class | None:
    """The documented class of which a module's attribute is an instance: `get = _Get()`."""
    value = getattr(member, "value", None)
    if not isinstance(value, griffe.ExprCall) or value.arguments:
        return None
    kind = member.parent.members.get(str(value.function))
    if isinstance(kind, griffe.Class) and kind.has_docstring and "__call__" in kind.members:
        return kind
    return None


def top_names(package: griffe.Module) -> str:
    links = []
    for name in sorted(package.exports or [], key=str.lower):
        target = package.members[str(name)].target_path.removeprefix("miniddp.")
        links.append(f"[`{name}`](#{anchor(target)})")
    return f"`import miniddp` gives you {', '.join(links)}. The others come from their modules."


# Blocks of markdown


def module_blocks(module: griffe.Module, address: str) -> Iterator[str]:
    yield f"### `miniddp.{module.name}` {{#{anchor(module.name)}}}"
    yield from docstring_blocks(module)
    for member in documented(module):
        yield from member_blocks(member, module.name, "####", address)
        shown = callable_of(member) or member
        if isinstance(shown, griffe.Class):
            for inner in documented(shown):
                if not inner.is_attribute or "property" in inner.labels:
                    owner = f"{module.name}.{member.name}"
                    yield from member_blocks(inner, owner, "#####", address)


def member_blocks(member: Named, owner: str, level: str, address: str) -> Iterator[str]:
    path = f"{owner}.{member.name}"
    yield f"{level} `{path.partition('.')[2]}` {{#{anchor(path)}}}"
    yield f"```signature\n{declaration(member)}\n```"
    yield from docstring_blocks(callable_of(member) or member)
    yield source_link(member, address)


def source_link(member: griffe.Object, address: str) -> str:
    file = f"src/{member.relative_package_filepath.as_posix()}"
    return f"[{file}, line {member.lineno}]({address}/{file}#L{member.lineno}){{.api-source}}"


def inside(module: griffe.Module, address: str) -> str:
    file = f"src/{module.relative_package_filepath.as_posix()}"
    return f"[`miniddp.{module.name}`]({address}/{file}): {markdown(summary(module))}"


def summary(module: griffe.Module) -> str:
    if not module.docstring:
        raise IncompleteError(f"miniddp.{module.name} has no docstring")
    return " ".join(module.docstring.value.split("\n\n")[0].split())


def docstring_blocks(owner: griffe.Object) -> Iterator[str]:
    sections = owner.docstring.parsed if owner.docstring else []
    for section in sections:
        if section.kind is griffe.DocstringSectionKind.text:
            yield from map(block, section.value.split("\n\n"))
        elif section.kind is griffe.DocstringSectionKind.parameters:
            yield "Arguments:"
            yield items((f"`{each.name}`", each.description) for each in section.value)
        elif section.kind is griffe.DocstringSectionKind.attributes:
            yield "Attributes:"
            yield items((f"`{each.name}`", each.description) for each in section.value)
        elif section.kind is griffe.DocstringSectionKind.raises:
            yield "Raises:"
            yield items((f"`{each.annotation}`", each.description) for each in section.value)
        elif section.kind is griffe.DocstringSectionKind.returns:
            yield "Returns: " + " ".join(markdown(each.description) for each in section.value)
        else:
            raise IncompleteError(f"{owner.path}: a docstring cannot have {section.kind.value}")


def items(entries: Iterator[tuple[str, str]]) -> str:
    return "\n".join(f"- {name}: {markdown(' '.join(text.split()))}" for name, text in entries)


def block(text: str) -> str:
    """A part of a docstring between blank lines: code where it is indented, a table, or prose."""
    lines = text.split("\n")
    if all(line.startswith("    ") for line in lines):
        return f"```\n{textwrap.dedent(text)}\n```"
    if all(line.startswith("|") for line in lines):
        return table([line.strip("|").split("|") for line in lines])
    return markdown(text)


def table(rows: list[list[str]]) -> str:
    """A pipe table, its columns aligned."""
    cells = [[markdown(cell.strip()) for cell in row] for row in rows if set("".join(row)) != {"-"}]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join(
        f"  | {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |"
        for row in cells
    )


def markdown(text: str) -> str:
    """A docstring's paragraph as markdown: what is no code means what it says."""
    parts = re.split(r"(``.+?``|`[^`]+`)", text, flags=re.DOTALL)
    for number in range(0, len(parts), 2):
        parts[number] = re.sub(r"([$@<>\[\]^~\\])", r"\\\1", parts[number])
    return "".join(parts).replace("…", "...")


def anchor(path: str) -> str:
    return "api-" + re.sub(r"[^\w]+", "-", path)


def identifier(title: str) -> str:
    return re.sub(r"\W+", "-", title.lower())


# Declarations


def declaration(member: Named) -> str:
    kind = callable_of(member)
    if kind:
        call = kind.members["__call__"]
        return wrapped(member.name, call.parameters, call.returns)
    if isinstance(member, griffe.Class):
        return f"class {wrapped(member.name, member.parameters, None)}"
    if isinstance(member, griffe.Function):
        return wrapped(member.name, member.parameters, member.returns)
    if "property" in member.labels:
        return f"{member.name}: {member.annotation}"
    return f"{member.name} = {default(member.value)}"


def wrapped(name: str, parameters: griffe.Parameters, returns: object) -> str:
    given = list(arguments(parameters))
    end = f" -> {returns}" if returns is not None else ""
    line = f"{name}({', '.join(given)}){end}"
    if len(line) <= LINE:
        return line
    return "\n".join([f"{name}(", *(f"    {each}," for each in given), f"){end}"])


def arguments(parameters: griffe.Parameters) -> Iterator[str]:
    """Parameters as Python writes them, without `self`."""
    kinds = griffe.ParameterKind
    before = None
    for each in parameters:
        if each.name in ("self", "cls"):
            continue
        if before is kinds.positional_only and each.kind is not before:
            yield "/"
        if each.kind is kinds.keyword_only and before not in (each.kind, kinds.var_positional):
            yield "*"
        before = each.kind
        yield argument(each)
    if before is kinds.positional_only:
        yield "/"


def argument(parameter: griffe.Parameter) -> str:
    stars = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}
    text = stars.get(parameter.kind, "") + parameter.name
    equals = "="
    if parameter.annotation is not None:
        text, equals = f"{text}: {parameter.annotation}", " = "
    if parameter.default is None or parameter.kind in stars:
        return text
    return text + equals + default(parameter.default)


def default(value: object) -> str:
    """`option(16, "pairs per rank")`, a field of a command line, has the default 16."""
    if isinstance(value, griffe.ExprCall) and str(value.function) == "option":
        value = value.arguments[0]
    return re.sub(r"'([^'\"]*)'", r'"\1"', str(value))


if __name__ == "__main__":
    sys.exit(main())
