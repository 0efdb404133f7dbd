"""A way through the site, by touch and by keyboard, under its content security policy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from .sites import BUILDS
from .test_pages import copy_button

PHONE = {"width": 390, "height": 800}


@pytest.mark.parametrize("name", [name for name in BUILDS if name.startswith("sample")])
def test_from_a_search_to_print(
    browser: Browser, servers: dict[str, str], name: str, tmp_path: Path
) -> None:
    context = browser.new_context(viewport=PHONE, has_touch=True, reduced_motion="reduce")
    context.grant_permissions(["clipboard-read", "clipboard-write"], origin=servers[name])
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda said: said.type == "error" and problems.append(said.text))

    # A line of code is found by search, and its note is read below it.
    page.goto(f"{servers[name]}/index.html", wait_until="load")
    page.keyboard.press("/")
    page.keyboard.type("total / sum(weights)")
    page.locator("dialog.search li a").first.tap()
    page.wait_for_url("**/01-everything.html*")
    page.locator("main [data-note='2']").first.tap()
    expect(page.get_by_text("Divided once.")).to_be_in_viewport()

    # The listing is copied, and runs.
    listing = page.locator("main .code pre").first
    copy_button(listing).tap()
    page.wait_for_function("navigator.clipboard.readText().then(text => text.includes('average'))")
    code = page.evaluate("navigator.clipboard.readText()") + "\nprint(average([1, 4], [2, 1]))\n"
    (tmp_path / "copied.py").write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "copied.py"],
        cwd=tmp_path,
        capture_output=True,
        encoding="utf-8",
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("2.0\n", "")

    # What is folded is opened with the keyboard, and printed though it is folded.
    summary = page.get_by_text("See what happens")
    summary.focus()
    page.keyboard.press("Enter")
    answer = page.locator(".predict .answer p")
    expect(answer).to_be_visible()
    page.keyboard.press("Enter")
    expect(answer).to_be_hidden()
    page.emulate_media(media="print")
    assert answer.evaluate("answer => answer.getBoundingClientRect().height") > 10
    page.emulate_media(media="screen")

    # An exercise is ticked off, and the first page leads back to where it stands.
    page.get_by_role("checkbox", name="Done").check()
    page.goto(f"{servers[name]}/index.html", wait_until="load")
    page.locator(".read-on a").tap()
    page.wait_for_url("**/01-everything.html#exercises")
    expect(page.get_by_role("checkbox", name="Done")).to_be_checked()

    # The ring is stepped, and a calculation is kept as an address.
    page.goto(f"{servers[name]}/chapters/02-moving.html", wait_until="load")
    ring = page.locator(".widget.ring-stepper")
    before = ring.text_content()
    ring.get_by_role("button", name="One step forward").focus()
    page.keyboard.press("Enter")
    assert ring.text_content() != before
    share = page.get_by_role("link", name="Address of these numbers")
    page.goto(share.evaluate("link => link.href"), wait_until="load")
    expect(page.locator(".widget.scaling-calculator")).to_be_visible()
    assert "sizing=" in page.url
    assert problems == []
    context.close()
