"""The search of the Quarto build costs nothing before its first use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from .sites import BUILDS, DESKTOP

QUARTO = [name for name in BUILDS if name == "sample-quarto"]


@pytest.fixture(params=QUARTO or [pytest.param("", marks=pytest.mark.skip("no quarto on PATH"))])
def page(
    request: pytest.FixtureRequest, browser: Browser, servers: dict[str, str]
) -> Iterator[Page]:
    context = browser.new_context(viewport=DESKTOP)
    context.set_default_timeout(10000)
    page = context.new_page()
    page.problems = []  # type: ignore[attr-defined]
    page.asked = []  # type: ignore[attr-defined]
    page.on("pageerror", lambda error: page.problems.append(str(error)))  # type: ignore[attr-defined]
    page.on("request", lambda request: page.asked.append(request.url))  # type: ignore[attr-defined]
    page.goto(f"{servers[request.param]}/chapters/01-everything.html", wait_until="load")
    yield page
    assert page.problems == []  # type: ignore[attr-defined]
    context.close()


def searched(page: Page) -> bool:
    return any("quarto-search" in url for url in page.asked)  # type: ignore[attr-defined]


def test_what_is_typed_is_found(page: Page) -> None:
    assert not searched(page)
    page.get_by_role("searchbox").click()
    page.keyboard.type("weight", delay=20)
    results = page.locator("#quarto-search-results a")
    expect(results.first).to_be_visible()
    assert searched(page)
    expect(results.first).to_contain_text("weight")


def test_a_key_opens_it(page: Page) -> None:
    page.keyboard.press("/")
    expect(page.locator("input.aa-Input")).to_be_focused()
    assert searched(page)


def test_a_link_to_a_search_works(page: Page) -> None:
    page.goto(page.url + "?q=Divided")
    expect(page.locator("input.aa-Input")).to_have_value("Divided")
    assert searched(page)


def test_it_opens_on_a_phone(page: Page) -> None:
    page.set_viewport_size({"width": 360, "height": 800})
    page.locator(".quarto-search-button").click()
    page.keyboard.type("weight", delay=20)
    expect(page.locator(".aa-DetachedContainer a").first).to_be_visible()
