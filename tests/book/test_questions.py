"""The programs of the page *DDP and …*: each ends without an error, on two ranks."""

import re
from pathlib import Path

import pytest

from .programs import run_on_ranks

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted((ROOT / "runs/questions").glob("*.py"))
PAGE = ROOT / "appendix/ddp-and.qmd"


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_the_program_holds_what_it_asserts(program: Path) -> None:
    run_on_ranks(program)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_the_program_asserts_something_and_says_how_to_start_it(program: Path) -> None:
    text = program.read_text(encoding="utf-8")
    name = re.escape(f"runs/questions/{program.name}")
    command = rf"(torchrun --standalone --nproc_per_node=2|python) {name}"
    assert re.match(rf'"""[^\n]+\n\n{command}\n"""\n', text)
    assert text.count("assert ") + text.count("backward()") >= 1


def test_the_page_shows_every_program_once() -> None:
    quoted = re.findall(r'file="runs/questions/(\w+\.py)"', PAGE.read_text(encoding="utf-8"))
    assert sorted(quoted) == [program.name for program in PROGRAMS]
