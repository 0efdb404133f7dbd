"""Diagrams that move: in a page of the site, and what stays of them without JavaScript."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, expect

from .sites import BUILDS, DESKTOP

PAGE = "chapters/02-moving.html"
MODULES = [
    "ring-stepper",
    "shard-explorer",
    "unequal-shards",
    "bucket-timeline",
    "bucket-tuner",
    "scaling-calculator",
    "zero-stepper",
]
SAMPLES = [name for name in BUILDS if name.startswith("sample")]

LAID_OUT = """() => {
    const wrong = [], box = element => element.getBoundingClientRect();
    for (const widget of document.querySelectorAll(".widget")) {
        const frame = box(widget);
        if (getComputedStyle(widget).textAlign !== "start") wrong.push("aligned to the middle");
        for (const wide of widget.querySelectorAll(".board table, .readers, .lanes, .curve svg"))
            if (box(wide).width < 0.9 * frame.width) wrong.push(wide.outerHTML.slice(0, 80));
        const cells = [...widget.querySelectorAll(".board tbody tr:first-child td")].map(box);
        if (cells.some((cell, i) => i && (cell.left < cells[i - 1].right - 1 || cell.width < 60)))
            wrong.push("the ranks do not stand side by side");
        for (const badge of [...widget.querySelectorAll(".rank-badge")].map(box))
            if (badge.width > 40 || badge.height > 40) wrong.push("a badge is too large");
    }
    return wrong;
}"""


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
    # Nothing of the page's frame gets hold of what is inside.
    assert page.evaluate(LAID_OUT) == []
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
    for number in range(1, len(MODULES) + 1):
        expect(page.get_by_text(f"Figure\u00a0{number}:", exact=False)).to_be_visible()
    context.close()
