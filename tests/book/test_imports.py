"""The flow of imports in `src` is one way. `python -m tests.book.imports` draws it."""

from __future__ import annotations

from pathlib import Path

import pytest

from .imports import SRC, Imports, circle, read_imports

FLOORS = [
    {"backend"},
    {"process"},
    {"bucket"},
    {"accumulation", "hooks", "replicate", "ring", "sampler"},
    {"ddp", "launch", "naive", "zero"},
    {"check"},
    {"miniddp"},
]
"""The rooms of miniddp: each imports from floors below (earlier in this list), or from itself."""


def room(module: str) -> str:
    """`ddp` for `miniddp.ddp.reducer`, `miniddp` for the package's own file."""
    return f"{module}.miniddp".split(".")[1]


def upward_arrows(imports: Imports) -> list[str]:
    """The imports within miniddp that do not go down, or stay within a room."""
    floor_of = {name: number for number, floor in enumerate(FLOORS) for name in floor}
    found = []
    for module in sorted(imports):
        for imported in sorted(imports[module]):
            goes_down = floor_of[room(imported)] < floor_of[room(module)]
            if not goes_down and room(imported) != room(module):
                found.append(f"{module} imports {imported}")
    return found


@pytest.fixture(scope="module")
def imports() -> Imports:
    return read_imports(SRC)


def within_miniddp(imports: Imports) -> Imports:
    return {
        module: {name for name in imported if name.split(".")[0] == "miniddp"}
        for module, imported in imports.items()
        if module.split(".")[0] == "miniddp"
    }


def test_no_two_files_import_each_other(imports: Imports) -> None:
    assert len(imports) > 40
    assert circle(imports) == []


def test_miniddp_imports_neither_the_trainer_nor_the_instruments(imports: Imports) -> None:
    assert {module.split(".")[0] for module in imports} == {"miniddp", "finetune", "instruments"}
    inside = within_miniddp(imports)
    assert {module: imports[module] for module in inside} == inside


def test_every_room_of_miniddp_has_a_floor(imports: Imports) -> None:
    assert {room(module) for module in within_miniddp(imports)} == set().union(*FLOORS)


def test_no_arrow_within_miniddp_goes_up(imports: Imports) -> None:
    assert upward_arrows(within_miniddp(imports)) == []


def write(folder: Path, files: dict[str, str]) -> Imports:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return read_imports(folder)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"a/b.py": "from a import c", "a/c.py": "import os\nimport a.b"}, ["a.b", "a.c", "a.b"]),
        (
            {"a/b.py": "def late():\n    from .c import f", "a/c.py": "from a.b import late"},
            ["a.b", "a.c", "a.b"],
        ),
        (
            {"b.py": "import c", "c.py": "from d.e import f", "d/e.py": "from b import g"},
            ["b", "c", "d.e", "b"],
        ),
        (
            {"a/__init__.py": "from .b import f", "a/b.py": "from a import g"},
            ["a", "a.b", "a"],
        ),
        (
            {"a/b/c.py": "from ..d import f", "a/d.py": "from .b import c"},
            ["a.b.c", "a.d", "a.b.c"],
        ),
        (
            {"a/__init__.py": "from .b import f", "a/b.py": "from a import c", "a/c.py": ""},
            [],
        ),
        ({"b.py": "import c, d", "c.py": "import d", "d.py": "import os.path"}, []),
    ],
    ids=["two", "late", "three", "package", "relative", "beside a package", "none"],
)
def test_a_planted_circle_is_found(
    tmp_path: Path, files: dict[str, str], expected: list[str]
) -> None:
    assert circle(write(tmp_path, files)) == expected


def test_a_planted_arrow_upwards_is_found(tmp_path: Path) -> None:
    planted = {
        "miniddp/process.py": "",
        "miniddp/ring.py": "from miniddp.process import get\nfrom miniddp import hooks",
        "miniddp/hooks.py": "def late():\n    from miniddp.ddp.reducer import Reducer",
        "miniddp/ddp/reducer.py": "import miniddp.hooks",
        "miniddp/ddp/wrapper.py": "from miniddp.ddp import reducer",
        "miniddp/__init__.py": "from miniddp.ddp.wrapper import f",
    }
    assert upward_arrows(write(tmp_path, planted)) == [
        "miniddp.hooks imports miniddp.ddp.reducer",
        "miniddp.ring imports miniddp.hooks",
    ]
