"""The diagrams keep to their visual language (vis/README.md), and tell the truth about the ring."""

import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import pytest

from miniddp.ring import reduce_scatter_steps

ROOT = Path(__file__).parents[3]
DIAGRAMS = sorted(path for path in (ROOT / "vis").glob("*.svg") if path.name != "favicon.svg")
SVG = "{http://www.w3.org/2000/svg}"
NARROW = 328  # CSS pixels left for a diagram on a page of 360
SMALLEST_TEXT = 10  # CSS pixels
FONTS = {"system-ui, sans-serif", "ui-monospace, monospace"}
SHAPES = {"rect", "circle", "path", "polygon", "text", "tspan", "use", "g"}
TAGS = SHAPES | {"svg", "title", "desc", "style", "defs", "marker"}

diagrams = pytest.mark.parametrize("path", DIAGRAMS, ids=lambda path: path.stem)


def root_of(path):
    return ElementTree.parse(path).getroot()


def css_of(root):
    return root.find(f"{SVG}style").text


def rules(css):
    """The (selector, {property: value}) pairs, those of a media query included."""
    found = re.findall(r"([^{}]+)\{([^{}]*)\}", re.sub(r"@media[^{]+\{", "", css))
    return [(selector.strip(), declarations(body)) for selector, body in found]


def declarations(body):
    pairs = (line.split(":", 1) for line in body.split(";") if line.strip())
    return {name.strip(): value.strip() for name, value in pairs}


def tokens(theme):
    """The colours that theme/book.css gives to `light` or `dark`."""
    css = (ROOT / "theme" / "book.css").read_text()
    colours = re.findall(r"--([\w-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\);", css)
    return {name: light if theme == "light" else dark for name, light, dark in colours}


def classes(root):
    return [name for element in root.iter() for name in element.get("class", "").split()]


def test_there_are_diagrams():
    assert len(DIAGRAMS) >= 8


@diagrams
def test_root_is_an_accessible_scalable_image(path):
    root, stem = root_of(path), path.stem
    assert root.tag == f"{SVG}svg"
    assert root.get("role") == "img"
    assert root.get("aria-labelledby") == f"{stem}-title {stem}-desc"
    assert re.fullmatch(r"0 0 [\d.]+ [\d.]+", root.get("viewBox"))
    assert root.get("width") is None
    assert root.get("height") is None
    title, desc = root[0], root[1]
    assert (title.tag, title.get("id")) == (f"{SVG}title", f"{stem}-title")
    assert (desc.tag, desc.get("id")) == (f"{SVG}desc", f"{stem}-desc")
    assert 10 <= len(title.text) <= 90
    assert len(desc.text) > len(title.text)


@diagrams
def test_elements_are_drawn_by_hand(path):
    root = root_of(path)
    assert {element.tag.removeprefix(SVG) for element in root.iter()} <= TAGS
    for element in root.iter():
        assert not [name for name in element.attrib if name.startswith("on")]
        assert element is root or not element.get("style")


@diagrams
def test_ids_and_classes_carry_the_stem(path):
    root, stem = root_of(path), path.stem
    ids = [element.get("id") for element in root.iter() if element.get("id")]
    assert [name for name in ids + classes(root) if not name.startswith(f"{stem}-")] == []
    assert [name for name, count in Counter(ids).items() if count > 1] == []


def test_no_two_diagrams_share_an_id_or_a_class():
    seen = Counter()
    for path in DIAGRAMS:
        root = root_of(path)
        seen.update({*classes(root), *(element.get("id") for element in root.iter())} - {None})
    assert [name for name, count in seen.items() if count > 1] == []


@diagrams
def test_style_rules_are_scoped_and_used(path):
    root, stem = root_of(path), path.stem
    selectors = [selector for selector, _ in rules(css_of(root))]
    assert selectors.pop() == "svg:root"  # the file on its own, never a diagram in a page
    assert [name for name in selectors if not re.fullmatch(rf"\.{stem}-[\w-]+", name)] == []
    assert {name[1:] for name in selectors} == set(classes(root))


@diagrams
def test_nothing_comes_from_outside(path):
    root, text = root_of(path), path.read_text()
    assert "@import" not in text
    assert re.findall(r"(?:https?:)?//[^\s\"']+", text) == ["http://www.w3.org/2000/svg"]
    ids = {element.get("id") for element in root.iter()}
    for element in root.iter():
        assert [name for name in element.attrib if name.endswith("}href")] == []
        if element.get("href"):
            assert element.get("href").removeprefix("#") in ids
    assert {
        name for name in re.findall(r"url\(([^)]*)\)", text) if name.lstrip("#") not in ids
    } == set()


@diagrams
def test_only_colours_of_the_palette(path):
    root, light, dark = root_of(path), tokens("light"), tokens("dark")
    values = [
        (name, value)
        for selector, properties in rules(css_of(root))
        if selector != "svg:root"
        for name, value in properties.items()
    ]
    values += [pair for element in root.iter() for pair in element.items()]
    used = set()
    for name, value in values:
        if name not in ("fill", "stroke", "color"):
            assert "#" not in value.replace("#" + path.stem, ""), (name, value)
            continue
        token = re.fullmatch(r"var\(--([\w-]+), (#[0-9a-f]{6})\)", value)
        assert token or value in ("none", "currentColor"), (
            f"{name}: {value} is no colour of the palette"
        )
        if token:
            assert token[2] == light[token[1]], f"{token[1]} is {light[token[1]]} in theme/book.css"
            used.add(token[1])
    stand_alone = dict(rules(css_of(root)))["svg:root"]
    assert stand_alone.pop("background") == f"var(--bg, {light['bg']})"
    assert stand_alone == {f"--{token}": dark[token] for token in used | {"bg", "fg"}}


@diagrams
def test_text_is_text_and_large_enough(path):
    root = root_of(path)
    scale = NARROW / float(root.get("viewBox").split()[2])
    texts = list(root.iter(f"{SVG}text"))
    assert len(texts) >= 5
    assert all("".join(text.itertext()).strip() for text in texts)
    assert root.get("font-family") in FONTS
    assert "font-size" not in css_of(root)
    sizes = [float(element.get("font-size")) for element in root.iter() if element.get("font-size")]
    assert min(sizes) * scale >= SMALLEST_TEXT
    families = re.findall(r"font-family: ([^;]+);", css_of(root))
    assert set(families) <= FONTS
    assert max((len(element.get("d")) for element in root.iter(f"{SVG}path")), default=0) < 300


def luminance(colour):
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a, b):
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def over(colour, opacity, backdrop):
    return tuple(opacity * c + (1 - opacity) * b for c, b in zip(colour, backdrop, strict=True))


def rgb(code):
    return tuple(int(code[i : i + 2], 16) / 255 for i in (1, 3, 5))


@pytest.mark.parametrize("theme", ["light", "dark"])
@diagrams
def test_text_stands_out_from_what_lies_under_it(path, theme):
    colour = {name: rgb(code) for name, code in tokens(theme).items()}
    root = root_of(path)
    opacity = {
        selector.rpartition("-")[2]: float(properties["fill-opacity"])
        for selector, properties in rules(css_of(root))
        if "fill-opacity" in properties
    }
    opacities = [float(e.get("fill-opacity")) for e in root.iter() if e.get("fill-opacity")]
    tint = max([opacity.get("tint", 0), *opacities])
    assert contrast(colour["fg"], colour["bg"]) >= 4.5
    assert contrast(colour["muted"], colour["surface"]) >= 4.5
    for rank in range(4):
        tone = colour[f"rank-{rank}"]
        lane = over(tone, opacity.get("lane", 0), colour["bg"])
        assert contrast(colour["fg"], over(tone, tint, lane)) >= 4.5
        assert contrast(colour["muted"], lane) >= 4.5
        assert contrast(colour["bg"], tone) >= 4.5
        assert contrast(tone, lane) >= 3  # lines and borders


def test_ring_shows_the_first_step_of_the_code():
    texts = [
        "".join(text.itertext()) for text in root_of(ROOT / "vis" / "ring.svg").iter(f"{SVG}text")
    ]
    chunks = [text for text in texts if re.fullmatch("[abcd][₀₁₂₃]", text)]
    first = [reduce_scatter_steps(rank, 4)[0][0] for rank in range(4)]
    assert chunks == ["abcd"[rank] + "₀₁₂₃"[chunk] for rank, chunk in enumerate(first)]


MISPLACED_TEXT = """() => [...document.querySelectorAll('svg')].flatMap(svg => {
  const frame = svg.getBoundingClientRect(), scale = frame.width / svg.viewBox.baseVal.width;
  const texts = [...svg.querySelectorAll('text')].filter(text => !text.closest('defs'))
    .map(text => ({name: text.textContent, box: text.getBoundingClientRect()}));
  const outside = texts.filter(({box}) => box.left < frame.left || box.right > frame.right
    || box.top < frame.top || box.bottom > frame.bottom).map(({name}) => `${name} is cut off`);
  const over = texts.flatMap((a, i) => texts.slice(i + 1).filter(b =>
    Math.min(a.box.right, b.box.right) - Math.max(a.box.left, b.box.left) > scale &&
    Math.min(a.box.bottom, b.box.bottom) - Math.max(a.box.top, b.box.top) > 3 * scale)
    .map(b => `${a.name} lies on ${b.name}`));
  return [...outside, ...over].map(problem => `${svg.querySelector('title').id}: ${problem}`);
})"""


@pytest.mark.parametrize("width", [360, 1280])
def test_no_text_is_cut_off_or_lies_on_other_text(browser, width):
    page = browser.new_page(viewport={"width": width, "height": 800})
    page.set_content("<meta charset=utf-8>" + "".join(path.read_text() for path in DIAGRAMS))
    assert page.evaluate(MISPLACED_TEXT) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.close()


def css_colour(code):
    return "rgb({}, {}, {})".format(*(round(255 * channel) for channel in rgb(code)))


def test_the_page_chooses_the_colours_and_a_file_alone_follows_the_system(browser):
    page = browser.new_page(color_scheme="dark")
    fill = "getComputedStyle(document.querySelector('text')).fill"
    ring = ROOT / "vis" / "ring.svg"
    page.set_content("<style>:root { --fg: #123456 }</style>" + ring.read_text())
    assert page.evaluate(fill) == css_colour("#123456")
    page.set_content(ring.read_text())
    assert page.evaluate(fill) == css_colour(tokens("light")["fg"])
    page.goto(ring.as_uri())
    assert page.evaluate(fill) == css_colour(tokens("dark")["fg"])
    page.close()
