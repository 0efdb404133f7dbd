"""What every page of the site promises, seen in a browser."""

from __future__ import annotations

import contextlib
import itertools
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Locator, Page, expect
from playwright.sync_api import Error as PlaywrightError

from .sites import Visit

TIP = "[role=tooltip]:visible"
NOTES = "main .notes > div"
DARK = "rgb(20, 23, 28)"
LIGHT = "rgb(255, 255, 255)"
# The lines of a code block, without its buttons: every line is a span with a name. What changes
# between two files is not copied.
CODE_TEXT = """pre => [...pre.querySelectorAll("code > span[id]")]
    .map(line => line.textContent).join("\\n")"""
# The text of an element as it is read: a formula once, without the TeX that MathML carries along.
READ = """element => {
    const copy = element.cloneNode(true);
    copy.querySelectorAll("annotation").forEach(each => each.remove());
    return copy.textContent;
}"""
FITS = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
# What passes is not told, which takes most of the time; a dark page differs in its colours only.
AXE = {"resultTypes": ["violations"], "preload": False, "rules": {"target-size": {"enabled": True}}}
COLOURS = {"type": "rule", "values": ["color-contrast", "link-in-text-block"]}
# What sticks out of the window, apart from what scrolls inside an element of its own.
TOO_WIDE = """() => {
    const clipped = element => element && element !== document.body
        && (getComputedStyle(element).overflowX !== "visible" || clipped(element.parentElement));
    return [...document.querySelectorAll("body *")]
        .filter(element => element.getBoundingClientRect().right > innerWidth + 1)
        .filter(element => !clipped(element.parentElement))
        .map(element => element.outerHTML.slice(0, 120)).slice(0, 5);
}"""


def background(page: Page) -> str:
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def visible(locator: Locator) -> list[Locator]:
    return [element for element in locator.all() if element.is_visible()]


def test_nothing_is_asked_of_another_host(visited: Visit) -> None:
    own = urlsplit(visited.page.url).netloc
    assert visited.requests
    assert [url for url in visited.requests if urlsplit(url).netloc not in (own, "")] == []


def test_a_page_keeps_to_its_weight(visited: Visit) -> None:
    """All that a browser loads for it, uncompressed. A stock Quarto page weighs 1,649 KB."""
    sizes = visited.page.evaluate(
        """() => Object.fromEntries(["navigation", "resource"]
            .flatMap(kind => performance.getEntriesByType(kind))
            .map(entry => [entry.name, entry.decodedBodySize]))"""
    )
    assert sum(sizes.values()) <= 700_000, sorted(sizes.items(), key=lambda item: -item[1])[:4]


def test_the_console_is_silent(visited: Visit) -> None:
    assert visited.complaints == []


@pytest.mark.behaviour
def test_a_dark_system_is_followed(visit: Visit) -> None:
    assert background(visit.page) == LIGHT
    visit.page.emulate_media(color_scheme="dark")
    assert background(visit.page) == DARK


@pytest.mark.behaviour
def test_the_theme_is_switched_and_stays(visit: Visit) -> None:
    page = visit.page
    page.locator(".theme-toggle:visible").first.click()
    assert background(page) == DARK
    page.reload(wait_until="load")
    assert background(page) == DARK
    page.locator(".theme-toggle:visible").first.click()
    assert background(page) == LIGHT
    page.emulate_media(color_scheme="dark")
    assert background(page) == LIGHT


def test_axe_would_find_something(browser: Browser) -> None:
    with browser.new_page() as page:
        page.set_content(
            "<html lang=en><title>T</title><main><h1>T</h1><img src='x.png'>"
            "<p style='color: #bbb; background: white'>Hardly legible.</p></main></html>"
        )
        for options, expected in (
            (AXE, {"image-alt", "color-contrast"}),
            ({**AXE, "runOnly": COLOURS}, {"color-contrast"}),
        ):
            found = Axe().run(page, options=options).response["violations"]
            assert expected <= {rule["id"] for rule in found}


def test_axe_finds_nothing(visit: Visit) -> None:
    for scheme, axe, options in (
        ("light", Axe(), AXE),
        ("dark", Axe("null"), {**AXE, "runOnly": COLOURS}),  # its script is in the page
    ):
        visit.page.emulate_media(color_scheme=scheme)
        found = axe.run(visit.page, options=options).response["violations"]
        problems = [
            f"{rule['id']}: {node['html'][:160]} ({node['failureSummary']})"
            for rule in found
            for node in rule["nodes"]
            if not (rule["id"] == "empty-table-header" and "<math" in node["html"])
        ]  # axe does not read MathML: it takes a header that is a formula for an empty one
        assert problems == [], scheme


@pytest.mark.behaviour
def test_a_finger_finds_every_target(visit: Visit) -> None:
    visit.page.set_viewport_size({"width": 360, "height": 800})
    only = {"type": "rule", "values": ["target-size"]}
    found = Axe().run(visit.page, options={"runOnly": only}).response["violations"]
    small = [node["html"][:120] for rule in found for node in rule["nodes"]]
    assert small == []


def check_tip(page: Page, owner: Locator, text: str) -> None:
    """The tooltip shows on focus and on hover, says `text`, and goes on Escape."""
    for show in (owner.focus, owner.hover):
        show()
        expect(page.locator(TIP).first).to_be_visible()
        assert "".join(page.locator(TIP).first.evaluate(READ).split()) == "".join(text.split())
        page.keyboard.press("Escape")
        expect(page.locator(TIP)).to_have_count(0)
        owner.blur()
        page.mouse.move(0, 0)


@pytest.mark.behaviour
def test_terms_explain_themselves(visit: Visit) -> None:
    for term in visible(visit.page.locator("main a.term[data-tip]"))[:2]:
        check_tip(visit.page, term, term.get_attribute("data-tip") or "")


@pytest.mark.behaviour
def test_recorded_values_say_where_from(visit: Visit) -> None:
    for value in visible(visit.page.locator("main .recorded[data-tip]"))[:1]:
        check_tip(visit.page, value, value.get_attribute("data-tip") or "")


# Scripts hear of a new width before the next frame.
LAID_OUT = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
# For each note that is seen: what is wrong with where it stands, beside its line or below the code.
MISPLACED = """beside => [...document.querySelectorAll("main .notes > div")].map(note => {
    const box = element => element.getBoundingClientRect();
    const line = document.getElementById(note.querySelector("a").hash.slice(1));
    const [here, code] = [box(note), box(line.closest("div.sourceCode"))];
    const before = note.previousElementSibling && box(note.previousElementSibling);
    if (!note.checkVisibility()) return null;
    const text = note.textContent.slice(0, 50);
    if (note.querySelector("a").textContent.split(":")[0] !== line.dataset.note) return text;
    if (!beside || note.closest(".exercise, .predict, .answer"))
        return here.top >= code.bottom && here.width <= code.width + 1 ? null : text;
    const inPlace = Math.abs(here.top - box(line).top) < 2
        || before && here.top - before.bottom < 20;
    return here.left >= code.right && here.right <= innerWidth && inPlace ? null : text;
}).filter(Boolean)"""


@pytest.mark.behaviour
def test_notes_stand_below_the_code_where_there_is_no_room_beside_it(visit: Visit) -> None:
    visit.page.set_viewport_size({"width": 1000, "height": 900})
    visit.page.evaluate(LAID_OUT)
    assert visit.page.evaluate(MISPLACED, False) == []


LIT = """note => [note, document.getElementById(note.querySelector("a").hash.slice(1))]
    .map(element => element.classList.contains("lit"))"""


@pytest.mark.behaviour
def test_a_note_and_its_line_light_each_other(visit: Visit) -> None:
    page = visit.page
    for note in [
        *visible(page.locator(NOTES))[:2],
        *visible(page.locator(f".diff {NOTES[5:]}"))[:1],
    ]:
        link = note.locator("dt a")
        line = page.locator(link.evaluate("link => link.hash"))
        for point in (note.hover, line.hover, link.focus):
            point()
            assert note.evaluate(LIT) == [True, True]
            link.blur()
            page.mouse.move(0, 0)
            assert note.evaluate(LIT) == [False, False]


# The numbers of notes stand in a gutter of their own, beside the box in which the code scrolls.
ON_CODE = """() => [...document.querySelectorAll("main [data-note]")].filter(line => {
    const number = getComputedStyle(line, "::before");
    const [block, code] = ["pre", "code"].map(name => line.closest(name).getBoundingClientRect());
    const right = block.left + parseFloat(number.left) + parseFloat(number.width);
    return number.position !== "absolute" || right > code.left;
}).map(line => line.textContent)"""
# Blocks that scroll sideways: what each shows of it, and whether the keyboard reaches it.
SCROLLING = """() => [...document.querySelectorAll("main pre > code, main table:not(.widget *)")]
    .filter(code => code.scrollWidth > code.clientWidth + 1)
    .map(code => [code.textContent.slice(0, 60), code.tabIndex,
        getComputedStyle(code).backgroundImage.split("linear-gradient").length - 1])"""
# Lines of code that are broken.
BROKEN = """() => [...document.querySelectorAll("main div.sourceCode code span[id]")]
    .filter(line => line.checkVisibility() && !line.closest(".nb-in"))
    .filter(line => line.getBoundingClientRect().height
        > 1.9 * parseFloat(getComputedStyle(line).lineHeight))
    .map(line => line.textContent)"""
# Listings that scroll on a wide screen.
CUT_OFF = """() => innerWidth > 700 && [...document.querySelectorAll("main pre.sourceCode > code")]
    .filter(code => code.scrollWidth > code.clientWidth)
    .map(code => code.textContent.slice(0, 60))"""


# What stands at the start of a line though it touches the formula before it.
TORN_OFF = """() => [...document.querySelectorAll("main math:not([display=block])")].map(formula =>
{
    const next = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
    next.currentNode = formula.querySelector("annotation") ?? formula;
    while (next.nextNode() && formula.contains(next.currentNode));
    const text = next.currentNode;
    if (!/^[.,;:!?)\\]’”]/.test(text.data ?? "") || !formula.getClientRects().length) return null;
    const range = document.createRange();
    range.setStart(text, 0);
    range.setEnd(text, 1);
    const [sign, math] = [range, formula].map(each => each.getBoundingClientRect());
    return sign.left < math.right - 2 ? formula.parentElement.textContent.slice(0, 60) : null;
}).filter(Boolean)"""
FORMULAS = """() => [
    [...document.querySelectorAll("main math")].filter(each => each.getClientRects().length).length,
    [...document.fonts].filter(each => each.family.includes("STIX") && each.status === "loaded")
        .length]"""


BOTH_WIDTHS = {
    "a note is out of place": f"() => ({MISPLACED})(innerWidth > 1240)",
    "a line begins with what touches a formula": TORN_OFF,
    "the number of a note covers code": ON_CODE,
    "a line of code is broken": BROKEN,
    "a line of code does not fit": CUT_OFF,
}


@pytest.mark.parametrize("width", [360, 1280])
def test_there_is_room_for_all(visit: Visit, width: int) -> None:
    visit.page.set_viewport_size({"width": width, "height": 900})
    with contextlib.suppress(PlaywrightError):  # scripts may still lay the page out anew
        visit.page.wait_for_function(FITS, timeout=3000)
    assert visit.page.evaluate(FITS), visit.page.evaluate(TOO_WIDE)
    visit.page.evaluate(LAID_OUT)
    found = {name: visit.page.evaluate(script) for name, script in BOTH_WIDTHS.items()}
    assert {name: where for name, where in found.items() if where} == {}
    blocks = visit.page.evaluate(SCROLLING)
    assert [block for block in blocks if block[1:] != [0, 4]] == [], "it scrolls, and hides that"


LABELS_ARE_WHOLE = """() => [...document.querySelectorAll("main svg text")].every(label => {
    const [drawn, picture] = [label, label.closest("svg")].map(it => it.getBoundingClientRect());
    return drawn.left >= picture.left - 1 && drawn.right <= picture.right + 1;
})"""


def until(page: Page, condition: str) -> None:
    """Asked from outside: what waits inside a page evaluates text, which its policy forbids."""
    for _ in range(300):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(100)
    pytest.fail(f"never: {condition}")


@pytest.mark.behaviour
def test_text_has_the_size_that_the_reader_chose(visit: Visit) -> None:
    """Twice the usual size in the browser's settings: all of it grows, and still fits."""
    settings = visit.page.context.new_cdp_session(visit.page)
    size = "parseFloat(getComputedStyle(document.documentElement).fontSize)"
    usual = visit.page.evaluate(size)
    try:
        settings.send("Page.setFontSizes", {"fontSizes": {"standard": 32}})
        until(visit.page, f"{size} === {2 * usual}")
        for width in (360, 1280):
            visit.page.set_viewport_size({"width": width, "height": 900})
            until(visit.page, FITS)
            until(visit.page, LABELS_ARE_WHOLE)
    finally:
        settings.send("Page.setFontSizes", {"fontSizes": {"standard": 16}})
        settings.detach()


def test_formulas_have_their_font_and_other_pages_do_not_load_it(visited: Visit) -> None:
    visited.page.evaluate("document.fonts.ready.then(() => null)")
    formulas, loaded = visited.page.evaluate(FORMULAS)
    assert loaded == (formulas > 0)


# What is seen of each block of code and its button: how far it is below its file's name, where the
# button is in it, and its colours.
FRAMES = """() => [...document.querySelectorAll("main pre.sourceCode")].map(pre => {
    const around = pre.closest(".code-copy-outer-scaffold") ?? pre;
    const button = around.querySelector(".code-copy-button");
    const file = pre.closest(".code")?.querySelector(".code-file");
    if (!button || !pre.getClientRects().length) return null;
    const [block, mark] = [pre, button].map(each => each.getBoundingClientRect());
    const name = file?.getBoundingClientRect();
    const { color, backgroundColor, opacity } = getComputedStyle(button);
    return {
        gap: name ? Math.round(block.top - name.bottom) : 0,
        inPlace: name ? mark.top >= name.top && mark.bottom <= name.bottom
            : mark.top > block.top && mark.bottom < block.bottom,
        place: [block.right - mark.right, mark.top - block.top].map(Math.round),
        height: Math.round(block.height), color, backgroundColor, opacity,
    };
}).filter(Boolean)"""
# As Quarto puts a block and its button since 1.8.15.
SCAFFOLD = """() => document.querySelectorAll("main div.sourceCode > pre > .code-copy-button")
    .forEach(button => {
        const scaffold = document.createElement("div");
        const block = button.closest("div.sourceCode");
        scaffold.className = "code-copy-outer-scaffold";
        scaffold.style.position = "relative";
        block.replaceWith(scaffold);
        scaffold.append(block, button);
    })"""


def copy_button(block: Locator) -> Locator:
    """In the block; since Quarto 1.8.15 beside it, in a scaffold around both."""
    scaffold = block.locator("xpath=ancestor::div[@class='code-copy-outer-scaffold']")
    return (scaffold if scaffold.count() else block).locator(".code-copy-button")


@pytest.mark.behaviour
def test_code_and_its_button_look_the_same_in_every_quarto(visit: Visit) -> None:
    page = visit.page
    seen = {}
    for again in (False, True):
        if again:
            page.evaluate(SCAFFOLD)
        for width, scheme in itertools.product([1280, 360], ["light", "dark"]):
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme=scheme)
            frames = page.evaluate(FRAMES)
            assert [frame for frame in frames if frame["gap"] or not frame["inPlace"]] == []
            assert frames == seen.setdefault((width, scheme), frames)
    page.reload(wait_until="load")


@pytest.mark.behaviour
def test_code_is_copied_without_its_annotations(visit: Visit) -> None:
    page = visit.page
    blocks = [block for block in visible(page.locator("main pre.sourceCode"))
              if copy_button(block).count()]  # fmt: skip
    annotated = [block for block in blocks if block.locator("[data-note]").count()]
    with_needs = visible(page.locator("main .code[data-before] pre"))
    diffs = visible(page.locator("main .diff pre"))
    for block in [*blocks[:1], *annotated[:1], *with_needs[:1], *diffs[:1]]:
        block.hover()
        copy_button(block).click()
        copied = page.evaluate("navigator.clipboard.readText()")
        needs = block.evaluate("pre => pre.closest('.code')?.dataset.before ?? ''")
        assert copied.rstrip("\n") == (needs + block.evaluate(CODE_TEXT)).rstrip("\n")
        assert copied.strip()


@pytest.mark.behaviour
def test_tabs_are_turned_with_the_arrow_keys(visit: Visit) -> None:
    for tablist in visible(visit.page.locator("main [role=tablist]")):
        tabs = tablist.locator("[role=tab]").all()
        panels = [visit.page.locator(f"#{tab.get_attribute('aria-controls')}") for tab in tabs]
        tabs[0].focus()
        for key, chosen in (("ArrowRight", 1), ("ArrowLeft", 0)):
            visit.page.keyboard.press(key)
            expect(tabs[chosen]).to_be_focused()
            expect(tabs[chosen]).to_have_attribute("aria-selected", "true")
            expect(panels[chosen]).to_be_visible()
            for other, panel in enumerate(panels):
                if other != chosen:
                    expect(panel).to_be_hidden()


@pytest.mark.behaviour
def test_notes_are_printed_below_their_code(visit: Visit) -> None:
    visit.page.emulate_media(media="print")
    visit.page.set_viewport_size({"width": 700, "height": 900})
    assert visit.page.evaluate(MISPLACED, False) == []
    assert visible(visit.page.locator(".theme-toggle, .code-copy-button")) == []


@pytest.mark.behaviour
def test_the_menu_opens_on_a_phone(visit: Visit) -> None:
    if "quarto" in visit.name:
        pytest.skip("Quarto's own menu is not this project's code")
    page = visit.page
    page.set_viewport_size({"width": 360, "height": 800})
    chapters = page.locator("#site-nav")
    expect(chapters).to_be_hidden()
    page.locator(".nav-toggle").click()
    expect(chapters).to_be_visible()
    page.keyboard.press("Escape")
    expect(chapters).to_be_hidden()
