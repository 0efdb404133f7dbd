"""tools/reference.py: what a docstring becomes, and that the committed page is up to date."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import griffe
import pytest

import reference

RING = '''\
"""A ring.

    ring.all_reduce(tensor)

It is *round*.
"""

from dataclasses import dataclass

SEGMENT = 4 * 2**20
"""Bytes of a piece."""

LIMIT = 3


@dataclass
class Link:
    """A way from `a` to b."""

    alpha: float
    unit: str = "B/s"

    @property
    def name(self) -> str:
        """Its name."""

    def send(self, *tensors: int, wait: bool = False) -> None:
        """Send.

        | case | bytes |
        |---|---|
        | `all` | 2 |
        """

    def undocumented(self): ...

    def _hidden(self):
        """No."""


class _Get:
    """Which rank?"""

    def __call__(self, name: str, mesh: object | None = None) -> int: ...


get = _Get()


def reduce(
    tensor: list[int], /, op: str = "sum", *, group: object | None = None, **more: int
) -> int:
    """Sum <all> of [them] for $5 @ home.

    Args:
        tensor: what is
            summed.

    Raises:
        ValueError: nothing to sum.

    Returns:
        The bytes.
    """
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "src/miniddp"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(
        'from miniddp.ring import reduce\n\n__all__ = ["reduce"]\n', encoding="utf-8"
    )
    (folder / "ring.py").write_text(RING, encoding="utf-8")
    (folder / "worker.py").write_text('"""Runs in a rank."""\n', encoding="utf-8")
    (tmp_path / "_quarto.yml").write_text("book:\n  repo-url: https://example.org/r\n")
    monkeypatch.setattr(reference, "PARTS", {"The parts": ("About them.", "ring")})
    monkeypatch.setattr(reference, "INSIDE", "worker")
    return tmp_path


def test_a_module_becomes_its_public_names(package: Path) -> None:
    text = reference.page(package)
    headings = [line.split(" {")[0] for line in text.split("\n") if line.startswith("#")]
    assert headings == [
        "## The parts",
        "### `miniddp.ring`",
        "#### `SEGMENT`",
        "#### `Link`",
        "##### `Link.name`",
        "##### `Link.send`",
        "#### `get`",
        "#### `reduce`",
        "## Inside",
    ]
    assert "`import miniddp` gives you [`reduce`](#api-ring-reduce)." in text
    assert (
        "- [`miniddp.worker`](https://example.org/r/blob/main/src/miniddp/worker.py): "
        "Runs in a rank." in text
    )


@pytest.mark.parametrize(
    "block",
    [
        "A ring.\n\n```\nring.all_reduce(tensor)\n```\n\nIt is *round*.\n",
        "```signature\nSEGMENT = 4 * 2 ** 20\n```\n\nBytes of a piece.\n\n"
        "[src/miniddp/ring.py, line 10](https://example.org/r/blob/main/src/miniddp/ring.py#L10){.api-source}",
        '```signature\nclass Link(alpha: float, unit: str = "B/s")\n```',
        "```signature\nname: str\n```",
        "```signature\nsend(*tensors: int, wait: bool = False) -> None\n```",
        "  | case  | bytes |\n  | ----- | ----- |\n  | `all` | 2     |\n",
        "```signature\nget(name: str, mesh: object | None = None) -> int\n```\n\nWhich rank?",
        '```signature\nreduce(\n    tensor: list[int],\n    /,\n    op: str = "sum",\n    *,\n'
        "    group: object | None = None,\n    **more: int,\n) -> int\n```",
        "Sum \\<all\\> of \\[them\\] for \\$5 \\@ home.",
        "Arguments:\n\n- `tensor`: what is summed.\n\n",
        "Raises:\n\n- `ValueError`: nothing to sum.\n\nReturns: The bytes.",
    ],
)
def test_declarations_and_docstrings(package: Path, block: str) -> None:
    assert block in reference.page(package)


@pytest.mark.parametrize(
    ("parts", "inside", "message"),
    [
        ("ring", "", "miniddp.worker is in no part: add it to PARTS or INSIDE"),
        ("ring worker", "worker", "miniddp.worker is in two parts of the reference"),
        ("ring gone", "worker", "there is no miniddp.gone: take it out of PARTS and INSIDE"),
    ],
)
def test_every_module_has_one_place(
    package: Path, monkeypatch: pytest.MonkeyPatch, parts: str, inside: str, message: str
) -> None:
    monkeypatch.setattr(reference, "PARTS", {"Parts": ("", parts)})
    monkeypatch.setattr(reference, "INSIDE", inside)
    with pytest.raises(reference.IncompleteError) as caught:
        reference.page(package)
    assert str(caught.value) == message


def test_the_page_is_up_to_date() -> None:
    written = reference.PAGE.read_text(encoding="utf-8")
    assert reference.page(reference.ROOT) == written, "write it again: make reference"


def test_neither_torch_nor_the_package_is_imported() -> None:
    program = (
        "import sys; sys.path.insert(0, 'tools'); import reference; reference.page(reference.ROOT);"
        "assert not {'torch', 'miniddp'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=reference.ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_names_without_a_docstring_are_private_helpers() -> None:
    """A public function or class that the reference leaves out must at least be known here."""
    package = reference.load(reference.ROOT)
    listed = [name for _, names in reference.PARTS.values() for name in names.split()]
    missing = [
        f"{name}.{member.name}"
        for name in listed
        for member in package.modules[name].members.values()
        if member.is_public and not member.is_alias and not member.has_docstring
        and member.kind in (griffe.Kind.FUNCTION, griffe.Kind.CLASS)
        and not name.startswith("bench_")
    ]  # fmt: skip
    assert missing == ["sampler.check_rank"]
