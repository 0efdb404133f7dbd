"""tools/digest.py: what a run reaches, and what makes its recording stale."""

import ast
import re
from pathlib import Path

import jupytext
import pytest

import digest

RING = '''
"""Ring."""
import torch

SEGMENT = 4


def _split(tensor, n):
    """Prose."""
    # A comment.
    return tensor.chunk(n)


def all_reduce(tensor):
    return _split(tensor, SEGMENT)


def unused():
    return 1
'''
RUN = """# %% [markdown]
# # The ring
#
# What it shows.

# %% name="sum"
from book import record
from miniddp import ring

print(ring.all_reduce(1))

# %% [markdown]
# More prose.

# %%
record(x=1)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "src/miniddp").mkdir(parents=True)
    (tmp_path / "runs").mkdir()
    write(tmp_path, "src/miniddp/__init__.py", "")
    write(tmp_path, "src/miniddp/ring.py", RING)
    write(tmp_path, "runs/05-ring.py", RUN)
    return tmp_path


def write(project: Path, path: str, text: str) -> None:
    (project / path).write_text(text, encoding="utf-8")


def reached(project: Path, code: str) -> set[str]:
    write(project, "runs/06-other.py", f"# %%\n{code}\n")
    return set(digest.symbols(project, "06-other")) - {"runs/06-other.py"}


def edited(project: Path, path: str, old: str, new: str) -> list[str]:
    """What an edit makes stale in 05-ring."""
    before = digest.symbols(project, "05-ring")
    text = (project / path).read_text()
    assert old in text
    write(project, path, text.replace(old, new))
    return digest.differences(before, digest.symbols(project, "05-ring"))


def test_reaches_what_the_code_uses_and_no_more(project):
    assert list(digest.symbols(project, "05-ring")) == [
        "miniddp.ring:SEGMENT",
        "miniddp.ring:_split",
        "miniddp.ring:all_reduce",
        "runs/05-ring.py",
    ]


@pytest.mark.parametrize(
    "code",
    [
        "from miniddp.ring import all_reduce\nall_reduce(1)",
        "from miniddp.ring import all_reduce as r\nx = [r]",
        "import miniddp\nminiddp.ring.all_reduce(1)",
        "import miniddp.ring\nminiddp.ring.all_reduce(1)",
        "import miniddp.ring as m\nm.all_reduce(1)",
        "def f():\n    from miniddp import ring\n    return ring.all_reduce(1).mean()",
    ],
)
def test_every_way_of_importing(project, code):
    assert reached(project, code) == {
        "miniddp.ring:SEGMENT",
        "miniddp.ring:_split",
        "miniddp.ring:all_reduce",
    }


def test_a_module_that_is_started_by_its_file_counts_whole(project):
    every = reached(project, "import miniddp.ring\nminiddp.ring")
    assert every > reached(project, "from miniddp.ring import SEGMENT\nSEGMENT")
    assert reached(project, "from miniddp import ring\nprint(ring.__file__)") == every


def test_follows_reexports(project):
    write(project, "src/miniddp/naive.py", "from . import ring\nclass DDP:\n    f = ring.unused\n")
    expected = {"miniddp.naive:DDP", "miniddp.ring:unused"}
    write(project, "src/miniddp/__init__.py", "from miniddp.naive import DDP\n")
    assert reached(project, "from miniddp import DDP\nDDP()") == expected
    assert reached(project, "import miniddp as m\nm.DDP()") == expected


def test_follows_what_a_run_imports_from_a_folder_beside_it(project):
    (project / "runs/clinic").mkdir()
    write(project, "runs/clinic/early.py", "from miniddp.ring import unused as u\ndef f(): u()\n")
    assert reached(project, "from clinic.early import f\nf()") == {
        "clinic.early:f",
        "miniddp.ring:unused",
    }


def test_a_module_passed_around_or_started_by_name_counts_whole(project):
    everything = {f"miniddp.ring:{name}" for name in ("SEGMENT", "_split", "all_reduce", "unused")}
    assert reached(project, "from miniddp import ring\nprint(vars(ring))") == everything
    assert reached(project, "import os\nos.system('torchrun -m miniddp.ring --n 2')") == everything
    assert reached(project, "'''About miniddp.ring.'''") == set()


def test_statements_that_run_at_import_and_later_changes_of_a_name_count(project):
    source = "import sys\nprint(sys)\ndef get(): ...\nget.extra = 1\nif sys:\n    X = 1\n"
    write(project, "src/miniddp/process.py", source)
    assert reached(project, "from miniddp.process import get, X\nget(), X") == {
        "miniddp.process:<import>",
        "miniddp.process:get",
        "miniddp.process:X",
    }
    before = digest.symbols(project, "06-other")
    write(project, "src/miniddp/process.py", source.replace("extra = 1", "extra = 2"))
    after = digest.symbols(project, "06-other")
    assert digest.differences(before, after) == ["miniddp.process:get changed"]


def test_helpers_beside_the_runs_count_but_book_does_not(project):
    write(project, "runs/book.py", "def record(): ...\n")
    write(project, "runs/common.py", "from miniddp import ring\ndef f():\n    ring.unused()\n")
    code = "from common import f\nfrom book import record\nf(), record()"
    assert reached(project, code) == {"common:f", "miniddp.ring:unused"}


@pytest.mark.parametrize("folder", ["runs", "stages"])
def test_a_program_that_a_run_starts_counts_with_all_that_it_uses(project, folder):
    (project / folder).mkdir(exist_ok=True)
    program = "from miniddp.ring import unused\nif __name__ == '__main__':\n    unused()\n"
    write(project, f"{folder}/1_go.py", program)
    code = f"import os\nos.system('torchrun {folder}/1_go.py --n 2')"
    assert reached(project, code) == {f"{folder}/1_go.py", "miniddp.ring:unused"}
    before = digest.symbols(project, "06-other")
    write(project, f"{folder}/1_go.py", program.replace("unused()", "unused(), 1"))
    after = digest.symbols(project, "06-other")
    assert digest.differences(before, after) == [f"{folder}/1_go.py changed"]
    assert reached(project, "print('book.py and no.py')") == set()


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("src/miniddp/ring.py", "Prose.", "Other prose\n\n    on lines."),
        ("src/miniddp/ring.py", "# A comment.", "#\n\n    # Two."),
        ("src/miniddp/ring.py", "return 1", "return 2"),
        ("src/miniddp/ring.py", "import torch", "\n\nimport torch"),
        ("src/miniddp/ring.py", "SEGMENT = 4", "SEGMENT: int = (\n    4  # elements\n)"),
        ("src/miniddp/ring.py", "_split(tensor, n)", "_split(tensor: Tensor, n: int) -> list"),
        ("runs/05-ring.py", "More prose.", "Much more prose."),
        ("runs/05-ring.py", "record(x=1)", "# A remark.\nrecord(\n    x=1,\n)"),
    ],
)
def test_prose_and_unused_code_change_nothing(project, path, old, new):
    assert edited(project, path, old, new) == []


@pytest.mark.parametrize(
    ("path", "old", "new", "stale"),
    [
        ("src/miniddp/ring.py", "SEGMENT = 4", "SEGMENT = 5", ["miniddp.ring:SEGMENT changed"]),
        ("src/miniddp/ring.py", "chunk(n)", "chunk(n + 0)", ["miniddp.ring:_split changed"]),
        (
            "src/miniddp/ring.py",
            "_split(tensor, n)",
            "_split(tensor, n=2)",
            ["miniddp.ring:_split changed"],
        ),
        ("runs/05-ring.py", "record(x=1)", "record(x=1)\n'shown'", ["runs/05-ring.py changed"]),
        ("runs/05-ring.py", "record(x=1)", "record(x=1);", ["runs/05-ring.py changed"]),
        ("runs/05-ring.py", "x=1", "x=2", ["runs/05-ring.py changed"]),
        ("runs/05-ring.py", 'name="sum"', 'name="total"', ["runs/05-ring.py changed"]),
        (
            "src/miniddp/ring.py",
            "_split(tensor, SEGMENT)",
            "unused()",
            [
                "miniddp.ring:all_reduce changed",
                "miniddp.ring:SEGMENT is no longer used",
                "miniddp.ring:_split is no longer used",
                "miniddp.ring:unused is now used",
            ],
        ),
    ],
)
def test_names_what_made_it_stale(project, path, old, new, stale):
    assert edited(project, path, old, new) == stale


@pytest.mark.parametrize(
    ("head", "hint", "counts"),
    [
        ("@dataclass\nclass A:", "x: int", True),
        ("class A(NamedTuple):", "x: int = 1", True),
        ("class A:", "x: int = 1", False),
        ("def A():", "x: int = 1", False),
        ("def A(get_type_hints=1):", "x: int = 1", True),
    ],
)
def test_hints_count_where_they_make_fields_or_are_read(project, head, hint, counts):
    source = f"{head}\n    {hint}\n    y = 2\n"
    write(project, "src/miniddp/hinted.py", source)
    reached(project, "from miniddp.hinted import A\nA")
    before = digest.symbols(project, "06-other")
    write(project, "src/miniddp/hinted.py", source.replace("int", "float"))
    assert (digest.symbols(project, "06-other") != before) == counts


def test_a_digest_is_the_same_under_every_python():
    text = "def f(x, *, y=None, **z):\n    return f'{x!r:>4}{y=}', [*z], {**z}, x[1:], -1.5\n"
    assert digest.digest_of(ast.parse(text).body) == "41b65ff8d1db9f4f"


def test_a_comment_or_blank_line_inside_a_string_is_code(project):
    source = 'def f():\n    """Doc."""\n    return """a\n# kept\n\n    b"""\n'
    write(project, "src/miniddp/text.py", source)
    reached(project, "from miniddp.text import f\nf()")
    before = digest.symbols(project, "06-other")
    write(project, "src/miniddp/text.py", source.replace("# kept\n\n", "# kept\n"))
    assert digest.differences(before, digest.symbols(project, "06-other")) == [
        "miniddp.text:f changed"
    ]
    write(project, "src/miniddp/text.py", source.replace("Doc.", "Other."))
    assert digest.differences(before, digest.symbols(project, "06-other")) == []


@pytest.mark.parametrize(
    "source",
    [
        RUN,
        "import os\n\n# %% [markdown] tags=['t']\n#\n# a\n#  b\n#c\n\n"
        '# %% A title name="x"\ny = 1\n\n',
        "# %%\n\n# %% [raw]\n# z\n",
    ],
)
def test_cells_are_those_of_jupytext(source):
    theirs = jupytext.reads(source, fmt="py:percent").cells
    ours = digest.cells(source, "run")
    assert [(cell.kind, cell.source) for cell in ours] == [
        (cell.cell_type, cell.source) for cell in theirs
    ]
    assert [cell.name for cell in ours] == [cell.metadata.get("name") for cell in theirs]
    lines = source.split("\n")
    for cell in ours:
        if cell.kind == "code" and cell.source:
            assert "\n".join(lines[cell.line - 1 : cell.last_line]) == cell.source


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        (
            "runs/05-ring.py",
            "# %%\nfrom miniddp import nope\nnope()",
            "no 'nope' in module miniddp",
        ),
        ("runs/05-ring.py", "from miniddp.ring import *\n", "line 1: import names from miniddp"),
        ("runs/05-ring.py", "# %%\nx = (\n", "05-ring.py, line 2: not valid Python"),
        ("runs/05-ring.py", "# %% [markdown]\nx = 1\n", "line 2: a line of a markdown cell"),
        ("runs/05-ring.py", '# %% name="a"\n1\n# %% name="a"\n2', "two cells are named 'a'"),
    ],
)
def test_bad_input_is_named(project, path, text, message):
    write(project, path, text)
    with pytest.raises(digest.DigestError, match=message.replace("(", r"\(")):
        digest.symbols(project, "05-ring")


FUNCTION = """
def mean(total, parts):
    count = 0
    for part in parts:
        total += part
        count += 1
    try:
        squares = [square * count for square in parts if (root := square)]
    except ValueError as error:
        raise error
    def inner(count):
        nonlocal root
        return root, count, squares
    return total / len(parts), sorted(squares, key=lambda value: value + root), max, inner
"""
METHOD = "class Mean:\n    def forward(self, *others):\n        size = 1\n        return size\n"
CLOSURE = "def f():\n    x = 1\n    def g():\n        return x\n    return g\n"


def digest_of(source: str, folder: Path) -> str:
    path = folder / "module.py"
    path.write_text(source, encoding="utf-8")
    return digest.digest_of(digest.Module("module", path).tree.body)


def is_the_same(source: str, old: str, new: str, folder: Path) -> bool:
    changed = re.sub(rf"\b{old}\b", new, source)
    assert changed != source
    ast.parse(changed)
    return digest_of(changed, folder) == digest_of(source, folder)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (FUNCTION, "part"),
        (FUNCTION, "square"),
        (FUNCTION, "squares"),
        (FUNCTION, "error"),
        (METHOD, "size"),
        (CLOSURE, "x"),
    ],
)
def test_the_name_of_a_local_variable_does_not_count(source, name, tmp_path):
    assert is_the_same(source, name, "renamed", tmp_path)


@pytest.mark.parametrize(
    ("source", "old", "new"),
    [
        (FUNCTION, "total", "renamed"),  # a parameter
        (FUNCTION, "mean", "renamed"),
        (FUNCTION, "inner", "renamed"),  # a traceback shows it
        (FUNCTION, "value", "renamed"),  # a parameter of a lambda
        (FUNCTION, "max", "min"),  # from outside
        (FUNCTION, "square \\* count", "count * square"),  # swapped
        (FUNCTION, "return error|raise error", "raise count"),  # another local variable
        (METHOD, "others", "renamed"),
        (METHOD, "self", "this"),
        ("def f(): [max for max in []]; return max\n", "max", "min"),  # local and from outside
        ("def f():\n    import os\n    return os\n", "os", "re"),
        ("def f():\n    global x\n    x = 1\n", "x", "y"),
        ("def f():\n    x = 1\n    return locals()\n", "x", "y"),
        ("def f():\n    x = 1\n    return f'{x=}'\n", "x", "y"),
        ("def f():\n    class A:\n        x = 1\n    return A\n", "x", "y"),
        ("def f():\n    x = 1\n    y = 2\n    return x\n", "return x", "return y"),
        ("def f(x=1): return [x for x in [2]]\n", "x=1", "y=1"),
        ("x = 1\ndef f(): return x\n", "x", "y"),
        ("def f(a):\n    x, y = a\n    return x - y\n", "x, y", "y, x"),
    ],
)
def test_every_other_name_counts(source, old, new, tmp_path):
    assert not is_the_same(source, old, new, tmp_path)
