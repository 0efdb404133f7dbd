"""The search costs nothing before its first use, and finds what is typed as it stands."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from .sites import BUILDS, DESKTOP

RESULTS = "dialog.search li a"
INPUT = "dialog.search input"


@pytest.fixture(params=[name for name in BUILDS if name.startswith("sample")])
def page(
    request: pytest.FixtureRequest, browser: Browser, servers: dict[str, str]
) -> Iterator[Page]:
    context = browser.new_context(viewport=DESKTOP)
    context.set_default_timeout(10000)
    context.set_default_navigation_timeout(60_000)  # on a busy machine
    page = context.new_page()
    page.problems = []  # type: ignore[attr-defined]
    page.asked = []  # type: ignore[attr-defined]
    page.on("pageerror", lambda error: page.problems.append(str(error)))  # type: ignore[attr-defined]
    page.on("request", lambda request: page.asked.append(request.url))  # type: ignore[attr-defined]
    page.goto(f"{servers[request.param]}/chapters/02-moving.html", wait_until="load")
    yield page
    assert page.problems == []  # type: ignore[attr-defined]
    context.close()


def searched(page: Page) -> bool:
    return any("search" in url for url in page.asked)  # type: ignore[attr-defined]


def test_code_is_found_as_it_stands(page: Page) -> None:
    assert not searched(page)
    page.get_by_role("button", name="Search").first.click()
    expect(page.locator(INPUT)).to_be_focused()
    page.keyboard.type("return total  / sum(weights)")
    expect(page.locator("dialog.search mark").first).to_have_text("return total / sum(weights)")
    expect(page.locator(RESULTS).first).to_contain_text("Everything")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_url("**/chapters/01-everything.html*")


def test_most_of_the_words_of_a_message_are_enough_or_a_phrase(page: Page) -> None:
    page.keyboard.press("/")
    expect(page.locator(INPUT)).to_be_focused()
    page.keyboard.type("each value counts as often as rank 7 says")
    expect(page.locator(RESULTS).first).to_contain_text("Everything")
    page.locator(INPUT).fill(
        "/home/me/train.py:37: ZeroDivisionError [pid 41]: counts as often as rank 9 says"
    )
    expect(page.locator(RESULTS).first).to_contain_text("Everything")
    expect(page.locator("dialog.search mark").first).to_have_text("counts")
    page.locator(INPUT).fill("zygote quagmire says")
    expect(page.locator("dialog.search [role=status]")).to_have_text("No places")


def test_what_is_typed_before_the_script_has_come_is_searched(page: Page) -> None:
    script: list[Route] = []
    page.route("**/search.js", lambda route: script.append(route))
    with page.expect_request("**/search.js"):
        page.keyboard.press("/")
    page.keyboard.type("total / sum(")
    script[0].continue_()
    expect(page.locator(INPUT)).to_have_value("total / sum(")
    page.keyboard.type("weights)")
    expect(page.locator("dialog.search mark").first).to_have_text("total / sum(weights)")


def test_a_link_to_a_search_works(page: Page) -> None:
    page.goto(page.url + "?q=Divided")
    expect(page.locator("dialog.search input")).to_have_value("Divided")
    expect(page.locator(RESULTS).first).to_contain_text("Everything")


def test_it_opens_on_a_phone(page: Page) -> None:
    page.set_viewport_size({"width": 360, "height": 800})
    page.locator(".search-button:visible, .quarto-search-button:visible").first.click()
    expect(page.locator(INPUT)).to_be_focused()
    page.keyboard.type("weight")
    expect(page.locator(RESULTS).first).to_be_visible()
