"""Many programs: what is found, shrunk and counted."""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from .grammar import draw, features
from .judge import Verdict, judge
from .model import Spec
from .ranks import Ranks
from .shrink import shrink, stand_alone

NUMBERS = ("wrong", "ranks disagree", "other bits")
COMMON = {"ranks: 2", "ranks: 3", "blocks kind: linear"}


@dataclass
class Failure:
    seed: int
    spec: Spec
    verdict: Verdict
    programs: int = 1


@dataclass
class Campaign:
    """Draws and runs programs; failures of the same kind are shrunk once."""

    seconds: float = 15
    spoil: Callable[[], None] | None = None
    shrinks: bool = True
    verdicts: Counter[str] = field(default_factory=Counter)
    known: Counter[str] = field(default_factory=Counter)
    features: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    failures: dict[str, Failure] = field(default_factory=dict)
    pools: dict[int, Ranks] = field(default_factory=dict)

    def verdict_of(self, spec: Spec) -> Verdict:
        size = spec["ranks"]
        if size not in self.pools:
            self.pools[size] = Ranks(size, self.seconds, self.spoil)
        return judge(spec, self.pools[size].run(spec))

    def run(self, seeds: Iterable[int], until: float, say: Callable[[str], Any] = print) -> None:
        """One program a seed, until `monotonic()` is `until`."""
        for seed in seeds:
            if monotonic() > until:
                return
            spec = draw(seed)
            verdict = self.verdict_of(spec)
            self.verdicts[verdict.word] += 1
            self.features.update(set(features(spec)))
            if verdict.word == "known":
                self.known[verdict.why] += 1
            if verdict.word in ("both refuse", "better"):
                self.refusals[f"{verdict.word}: {signature(verdict.why)}"] += 1
            if verdict.fails:
                self.note(seed, spec, verdict, say)

    def note(self, seed: int, spec: Spec, verdict: Verdict, say: Callable[[str], Any]) -> None:
        key = kind_of(verdict)
        if self.counted(spec, verdict):
            return
        if verdict.word in NUMBERS and self.shrinks:
            spec = shrink(spec, lambda smaller: self.fails_alike(smaller, key))
            key = f"{verdict.word}: {', '.join(sorted(set(features(spec)) - COMMON))}"
        if key in self.failures:
            self.failures[key].programs += 1
            return
        if verdict.word not in NUMBERS and self.shrinks:
            spec = shrink(spec, lambda smaller: self.fails_alike(smaller, key))
        self.failures[key] = Failure(seed, spec, verdict)
        say(f"seed {seed}: {verdict.word}: {verdict.why[:300]}\n    {spec}")

    def counted(self, spec: Spec, verdict: Verdict) -> bool:
        """Whether a failure of this word needs no more than the program has: it is that one."""
        has = set(features(spec))
        for failure in self.failures.values():
            needs = set(features(failure.spec)) - COMMON
            if failure.verdict.word == verdict.word in NUMBERS and needs and needs <= has:
                failure.programs += 1
                return True
        return False

    def fails_alike(self, spec: Spec, key: str) -> bool:
        return kind_of(self.verdict_of(spec)) == key

    def stop(self) -> None:
        for ranks in self.pools.values():
            ranks.stop()

    def write(self, folder: Path) -> list[Path]:
        """Each failure as a file that runs."""
        folder.mkdir(parents=True, exist_ok=True)
        files = []
        for key, failure in self.failures.items():
            file = folder / f"found_{failure.seed}.py"
            comment = f"seed {failure.seed}, {key}\npython {file.name} miniddp|torch [ranks]"
            file.write_text(stand_alone(failure.spec, comment))
            files.append(file)
        return files


def kind_of(verdict: Verdict) -> str:
    if verdict.word in NUMBERS:
        return verdict.word
    return f"{verdict.word}: {signature(verdict.why)}"


def signature(why: str) -> str:
    """A message without its names and numbers."""
    return re.sub(r"'[^']*'|[a-z0-9.]*\.(weight|bias|table\S*)|\d+(\.\d+)?(e-\d+)?", "N", why)[:160]
