"""Check the spelling of pages, docstrings, comments, runs and diagrams: British English, by Harper.

    python tools/spell.py

Harper reads Markdown and Python, and leaves code, formulas and addresses out. The book's own markup
is taken out here. Words of the project are in tools/words.txt, one in a line: a word in lower case
may begin with a capital, and stands for its plural too.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WORDS = ROOT / "tools" / "words.txt"
FILES = ("*.md", "*.qmd", "chapters/*.*md", "appendix/*.qmd", "vis/*.md", ".github/**/*.md",
         "src/**/*.py", "tools/**/*.py", "exercises/**/*.py", "runs/*.py", "vis/*.svg")  # fmt: skip
SAID_ALOUD = re.compile(r'(?:fig-alt|fig-cap|title|needs|broken)="([^"]*)"')


def main() -> int:
    known = project_words()
    problems = [
        f"{name}, line {line}: {word!r} is unknown (near: {', '.join(near)})"
        for name, line, word, near in strangers(ROOT)
        if not forms(word) & known
    ]
    for each in problems:
        print(f"error: {each}")
    print(f"{len(problems)} unknown words; those of the project are in tools/words.txt")
    return 1 if problems else 0


def project_words() -> set[str]:
    return set(WORDS.read_text(encoding="utf-8").split())


def forms(word: str) -> set[str]:
    """What may stand for the word in the list: its singular, and both in lower case."""
    singular = {word, word.removesuffix("s"), word.removesuffix("es")}
    return singular | {form.lower() for form in singular}


def strangers(root: Path) -> Iterator[tuple[str, int, str, list[str]]]:
    """Every word that Harper does not know: its file, its line, itself, what is near."""
    with tempfile.TemporaryDirectory() as folder:
        for path in sorted({path for pattern in FILES for path in root.glob(pattern)}):
            name = path.relative_to(root).as_posix()
            copy = Path(folder) / copy_name(name)
            copy.write_text(prose(name, path.read_text(encoding="utf-8")), encoding="utf-8")
        for file in harper(folder):
            name = file["file"].replace("%", "/").removesuffix(".txt")
            for lint in file["lints"]:
                word = re.sub(r"['’]s?$", "", lint["matched_text"])
                if len(word) > 2 and word[1:].islower() and not re.search(r"[\d._]", word):
                    near = [text.split("“")[-1].rstrip("”") for text in lint["suggestions"]]
                    yield name, lint["line"], word, near


def copy_name(name: str) -> str:
    flat = name.replace("/", "%")
    return f"{flat}.txt" if name.endswith(".svg") else flat


def harper(folder: str) -> list[dict[str, Any]]:
    command = [Path(sys.prefix) / "bin" / "harper", "lint", "--only=SpellCheck", "--dialect=uk",
               f"--user-dict-path={os.devnull}", "--format=json", "--quiet",
               *sorted(os.listdir(folder))]  # fmt: skip
    done = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8")
    if not done.stdout.startswith("["):
        sys.exit(f"spell.py: harper failed: {done.stderr.strip()}")
    return json.loads(done.stdout)


def prose(name: str, text: str) -> str:
    """What Harper can read, on the lines of the text."""
    if name.endswith(".svg"):
        text = re.sub(r"<style.*?</style>|<[^>]*>", emptied, text, flags=re.DOTALL)
        return re.sub(r"(?m)^ +", "", text)
    if name.endswith(".py"):
        return text
    text = re.sub(r"\A---\n(.*?)\n---\n", front_matter, text, flags=re.DOTALL)
    text = re.sub(r"\{[^{}\n]*\}", lambda match: " ".join(SAID_ALOUD.findall(match[0])), text)
    text = re.sub(r"(?m)^:::+", "", text)
    text = re.sub(r"(?m)^( *): ", r"\1- ", text)  # a definition
    return re.sub(r"-?@[\w:.-]*\w", "", text)  # a citation


def front_matter(match: re.Match[str]) -> str:
    return "\n" + re.sub(r"(?m)^[\w-]+:( *>-)?", "", match[1]) + "\n\n"


def emptied(match: re.Match[str]) -> str:
    return " " + "\n" * match[0].count("\n")


if __name__ == "__main__":
    sys.exit(main())
