"""Each claim of the page has its evidence; what tests/package/test_claims.py names is a place."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "appendix/claims.qmd").read_text(encoding="utf-8")
TESTS = (ROOT / "tests/package/test_claims.py").read_text(encoding="utf-8")
PLACES = sorted(set(re.findall(r"([a-z0-9-]+)#(sec-[a-z0-9-]+)", TESTS)))
SECTIONS = dict(re.findall(r"^### [^\n]*\{#(sec-claims-\S+)\}\n(.*?)(?=^##|\Z)", PAGE, re.M | re.S))


@pytest.mark.parametrize(("page", "place"), PLACES, ids=lambda value: value)
def test_a_test_of_torch_names_a_place_in_the_book(page: str, place: str) -> None:
    files = [ROOT / folder / f"{page}.qmd" for folder in ("chapters", "appendix")]
    text = next(file for file in files if file.exists()).read_text(encoding="utf-8")
    assert f"#{place}}}" in text


def test_the_sections_are_found() -> None:
    assert len(SECTIONS) >= 28


@pytest.mark.parametrize("section", SECTIONS)
def test_a_claim_is_held_by_a_test_a_run_or_a_source(section: str) -> None:
    held = ("claims", section) in PLACES
    shown = "::: {.run name=" in SECTIONS[section]
    cited = "https://" in SECTIONS[section] or "[@" in SECTIONS[section]
    computed = "\\cdot" in SECTIONS[section] or "$16/N$" in SECTIONS[section]
    assert held or shown or cited or computed
