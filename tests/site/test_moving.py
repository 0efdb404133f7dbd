"""Diagrams that move: in a page of the site, and what stays of them without JavaScript."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, expect

from .conftest import BUILDS, DESKTOP

PAGE = "chapters/02-moving.html"
MODULES = ["ring-stepper", "shard-explorer", "bucket-timeline", "scaling-calculator"]
SAMPLES = [name for name in BUILDS if name.startswith("sample")]


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_diagram_moves(
    browser: Browser, servers: dict[str, str], name: str, scheme: str
) -> None:
    context = browser.new_context(viewport=DESKTOP, color_scheme=scheme)
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("response", lambda answer: answer.ok or problems.append(answer.url))
    page.goto(f"{servers[name]}/{PAGE}", wait_until="load")
    for module in MODULES:
        widget = page.locator(f"figure .widget.{module}")
        expect(widget).to_be_visible()
        expect(page.locator(f"[data-module={module}] .still")).to_have_count(0)
        controls = widget.locator(".controls").first
        surface = "getComputedStyle(document.documentElement).getPropertyValue('--surface')"
        assert page.evaluate(surface)
        assert controls.evaluate("e => getComputedStyle(e).backgroundColor") == (
            "rgb(246, 248, 250)" if scheme == "light" else "rgb(27, 32, 39)"
        )
    assert problems == []
    context.close()


@pytest.mark.parametrize("name", SAMPLES)
def test_without_javascript_there_is_a_still(
    browser: Browser, servers: dict[str, str], name: str
) -> None:
    context = browser.new_context(viewport=DESKTOP, java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{servers[name]}/{PAGE}", wait_until="load")
    for module in MODULES:
        stage = page.locator(f"[data-module={module}]")
        still = stage.locator(".still svg[role=img]")
        expect(still).to_be_visible()
        box = still.bounding_box()
        assert box is not None
        assert box["height"] > 100
        note = stage.locator("noscript p").bounding_box()
        assert note is not None
        assert note["height"] > 10
    for number in range(1, 5):
        expect(page.get_by_text(f"Figure\u00a0{number}:", exact=False)).to_be_visible()
    context.close()
