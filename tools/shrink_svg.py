"""Makes a drawn figure small without changing what it shows, once, when it is recorded."""

from __future__ import annotations

import hashlib
import re
from collections import Counter


def shrink_svg(svg: str) -> str:
    """The same figure with short numbers, and a class for each style used more than once.

    A style's class has one name in every figure of a page.
    """
    svg = re.sub(r"<[^>]+>", lambda tag: _shorter(tag[0]), svg)
    root, body = re.match(r"(\s*<svg[^>]*>)(.*)", re.sub(r"\n\s*", "\n", svg), re.DOTALL).groups()
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


def _shorter(tag: str) -> str:
    """In tags only: a number in a text is what the figure says."""
    tag = re.sub(
        r'(?<=\sd=")[^"]*', lambda path: re.sub(r"\s*([A-Za-z\s])\s*", r"\1", path[0]), tag
    )
    return re.sub(
        r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."), tag
    )
