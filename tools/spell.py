"""Check the spelling of the book: pages, README and its like, docstrings, runs and diagrams.

    python tools/spell.py
    python tools/spell.py --unused

Hunspell's dictionary is American, the book is British: `synchronise` counts as known because
`synchronize` is, and `synchronize` is an error. Words of the project are in tools/words.txt, one in
a line; one in lower case may begin with a capital. Code, formulas and addresses are left out.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from hunspell import Hunspell

from check import UNREAD, hidden

DICTIONARY = "en_US"  # the one that the package brings along
ROOT = Path(__file__).resolve().parent.parent
WORDS = ROOT / "tools" / "words.txt"
PROSE = ("*.qmd", "*.md", "chapters/*.qmd", "runs/*.qmd", "*/README.md", "_extensions/*/README.md")
SOURCE = ("src/**/*.py", "tools/**/*.py", "exercises/**/*.py", "runs/*.py")
WRITTEN_BY_A_TOOL = (
    "chapters/reference.qmd"  # out of docstrings, which are checked where they stand
)
SAID_ALOUD = re.compile(r"""(?:fig-alt|fig-cap|title|needs|broken)=("[^"]*"|'[^']*')""")
HIDDEN = (
    r"(`+)(?!`).+?(?<!`)\1(?!`)",  # inline code
    r"\$\$.*?\$\$|\$[^$\n]+\$",  # formulas
    r"\]\([^)]*\)|\]\[[^\]]*\]",  # targets of links
    r"\{\{?[^{}]*\}",  # attributes
    r"<[^<>]+>",  # HTML, addresses
    r"https?://\S+",
    r"-?@[\w:.-]*\w",  # citations
    r"&\w+;",
    r"(?<![\w-])--?[a-z][\w-]*",  # flags of commands
)
WORD = re.compile(r"(?<![\w/.])[^\W\d_]+(?:['’][^\W\d_]+)?(?![\w/]|\.\w)")
# British endings, and what they are in American.
AMERICAN = (
    (r"is(e|es|ed|er|ers|ing|able|ation|ations|ational)$", r"iz\1"),
    (r"ys(e|es|ed|er|ing)$", r"yz\1"),
    (r"our", "or"),
    (r"grey", "gray"),
    (r"ll(ed|ing|er|ers)$", r"l\1"),
    (r"re(s?)$", r"er\1"),
    (r"enc(e|es|ed)$", r"ens\1"),
    (r"ogue(s?)$", r"og\1"),
    (r"ue?ing$", "uing"),
)
BRITISH = (
    (r"iz(e|es|ed|er|ers|ing|able|ation|ations|ational)$", r"is\1"),
    (r"yz(e|es|ed|er|ing)$", r"ys\1"),
    (r"^(behavi|col|neighb|fav|hon|lab|vap|harb)or", r"\1our"),
    (r"^(cent|met|fib)er(s?)$", r"\1re\2"),
    (r"(mod|lab|canc|trav)el(ed|ing|er|ers)$", r"\1ell\2"),
    (r"^catalog(s?)$", r"catalogue\1"),
)
ALWAYS_Z = re.compile(r"(?i)^(?:.*size[ds]?|sizing|.*sizing|prize[ds]?|seize[ds]?|capsize[ds]?)$")


def main(arguments: list[str]) -> int:
    known = project_words()
    dictionary = Hunspell(DICTIONARY)
    problem_of = functools.cache(lambda word: problem(word, dictionary, known))
    seen: Counter[str] = Counter()
    problems = []
    for path in files(ROOT):
        name = path.relative_to(ROOT).as_posix()
        for line, word in words(path):
            seen[word] += 1
            message = problem_of(word)
            if message:
                problems.append(f"{name}, line {line}: {message}")
    if "--unused" in arguments:
        print("\n".join(sorted(known - {form for word in seen for form in forms(word)})))
        return 0
    for each in problems:
        print(f"error: {each}")
    print(f"{len(problems)} unknown words in {sum(seen.values())}")
    return 1 if problems else 0


def project_words() -> set[str]:
    return set(WORDS.read_text(encoding="utf-8").split())


def files(root: Path) -> Iterator[Path]:
    for pattern in (*PROSE, *SOURCE, "vis/*.svg"):
        yield from (path for path in sorted(root.glob(pattern)) if path != root / WRITTEN_BY_A_TOOL)


def words(path: Path) -> Iterator[tuple[int, str]]:
    """Every word of a file that a reader reads, with its line."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        passages = [
            *docstrings(text),
            *(markdown_cells(text) if path.parent.name == "runs" else []),
        ]
    elif path.suffix == ".svg":
        passages = [(1, text_of_drawing(text))]
    else:
        passages = [(1, front_matter(text)), (1, text), *said_aloud(text)]
    for first, passage in passages:
        for line, word in words_of(passage):
            yield first + line, word


def words_of(markdown: str) -> Iterator[tuple[int, str]]:
    """Words of markdown that are no code and no name in code, with their lines from 0."""
    text = hidden(markdown, *UNREAD, *HIDDEN)
    for match in WORD.finditer(text):
        word = match[0].replace("’", "'")
        inner = word[1:]
        if len(word) > 2 and (inner == inner.lower()):
            yield text.count("\n", 0, match.start()), word


def front_matter(text: str) -> str:
    """The title and the description, on their lines."""
    match = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    if not match:
        return ""
    return "\n" + re.sub(r"(?m)^[\w-]+:.*?(?=\s|$)( *>-?)?", "", match[1])


def said_aloud(text: str) -> Iterator[tuple[int, str]]:
    for match in SAID_ALOUD.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, match[1]


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """The strings that stand by themselves in a file: docstrings, and texts below constants."""
    for node in ast.walk(ast.parse(source)):
        value = getattr(node.value, "value", None) if isinstance(node, ast.Expr) else None
        if isinstance(value, str):
            yield node.lineno, hidden(value, r'"[^"]{1,200}"')  # without values and titles


def text_of_drawing(svg: str) -> str:
    elements = ElementTree.fromstring(svg).iter()
    shown = (element for element in elements if not element.tag.endswith("style"))
    return "\n".join(f"{element.text or ''} {element.tail or ''}" for element in shown)


def markdown_cells(source: str) -> Iterator[tuple[int, str]]:
    """The markdown of a percent-format notebook."""
    lines = source.split("\n")
    inside = False
    for number, line in enumerate(lines, 1):
        if line.startswith("# %%"):
            inside = "[markdown]" in line
        elif inside and line.startswith("#"):
            yield number, line[1:]


def forms(word: str) -> set[str]:
    """What may stand for the word in the list: without its ending, and in lower case."""
    stem = word.removesuffix("'s").removesuffix("'")
    singular = {stem, stem.removesuffix("s"), stem.removesuffix("es")}
    return singular | {form.lower() for form in singular}


def problem(word: str, dictionary: Hunspell, known: set[str]) -> str | None:
    if forms(word) & known:
        return None
    stem = word.removesuffix("'s").removesuffix("'")
    british = changed(stem, BRITISH)
    if british and not ALWAYS_Z.match(stem) and dictionary.spell(stem):
        return f"{word!r}: the book is British, it writes {british!r}"
    if dictionary.spell(stem) or dictionary.spell(word):
        return None
    for pattern, replacement in AMERICAN:
        american = re.sub(pattern, replacement, stem)
        if american != stem and dictionary.spell(american):
            return None
    near = ", ".join(dictionary.suggest(stem)[:3])
    return f"{word!r} is unknown" + (f" (near: {near})" if near else "")


def changed(word: str, rules: tuple[tuple[str, str], ...]) -> str | None:
    for pattern, replacement in rules:
        new = re.sub(pattern, replacement, word, flags=re.IGNORECASE)
        if new != word:
            return new
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
