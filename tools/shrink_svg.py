"""Makes a drawn figure small without changing what it shows, once, when it is recorded.

Short numbers, no groups and paths that do nothing, and a class for each style used more than once.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter

NOTHING = re.compile(r'<path d="[^"]*"\s+style="fill: none"/>| transform="rotate\(-?0 [^"]*"')


def shrink_svg(svg: str) -> str:
    """The same figure in fewer bytes. A style's class has one name in every figure of a page."""
    svg = re.sub(r"<[^>]+>", lambda tag: _shorter(tag[0]), svg)
    svg = _without_bare_groups(NOTHING.sub("", svg))
    return _with_classes(re.sub(r"\n\s*", "\n", svg))


def _shorter(tag: str) -> str:
    """In tags only: a number in a text is what the figure says."""
    tag = re.sub(r'(?<=\sd=")[^"]*', lambda path: _tight(path[0]), tag)
    return re.sub(
        r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."), tag
    )


def _tight(path: str) -> str:
    return re.sub(r"\s*([A-Za-z])\s*", r"\1", " ".join(path.split()))


def _without_bare_groups(svg: str) -> str:
    kept: list[bool] = []

    def group(match: re.Match[str]) -> str:
        if match[0] != "</g>":
            kept.append(match[0] != "<g>")
            return match[0] if kept[-1] else ""
        return match[0] if kept.pop() else ""

    return re.sub(r"</g>|<g(?:\s[^>]*)?>", group, svg)


def _with_classes(svg: str) -> str:
    root, body = re.match(r"(\s*<svg[^>]*>)(.*)", svg, re.DOTALL).groups()
    counts = Counter(re.findall(r'\sstyle="([^"]*)"', body))
    names = {style: f"s{hashlib.sha256(style.encode()).hexdigest()[:6]}"
             for style, count in counts.items() if count > 1}  # fmt: skip
    body = re.sub(
        r'style="([^"]*)"',
        lambda match: f'class="{names[match[1]]}"' if match[1] in names else match[0],
        body,
    )
    rules = "\n".join(f".{name} {{ {style} }}" for style, name in names.items())
    return f"{root}<style>{rules}</style>{body}" if rules else root + body
