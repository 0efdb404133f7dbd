"""Random numbers: do the ranks draw alike where they should not?"""

from collections.abc import Iterator

from miniddp.check.data import epochs
from miniddp.check.finding import Finding, Run, equal, found

TIMES = 2
"""So often it has to be seen."""


def find(run: Run) -> Iterator[Finding]:
    yield from forward(run)
    yield from workers(run)


def forward(run: Run) -> Iterator[Finding]:
    seen = 0
    for peers in run.side_by_side("forward"):
        draws = all(e["is_training"] and e.get("draws") for e in peers)
        seen += draws and equal(peers, "random")
        if seen == TIMES:
            yield found("same random numbers", peers[0], run.ranks)
            return


def workers(run: Run) -> Iterator[Finding]:
    """The data loaders' seeds are equal, and samples are made by chance."""
    for peers in epochs(run):
        have_workers = all(event["workers"] > 0 for event in peers)
        if not have_workers or not equal(peers, "base_seed"):
            continue
        if makes_samples_by_chance(run, peers[0]["line"]):
            yield found("workers draw alike", peers[0], run.ranks)
            return


def makes_samples_by_chance(run: Run, line: str) -> bool:
    """Whether a sample was another one when it was read again."""
    seen: dict[int, int] = {}
    for event in run.of_kind(0, "batch"):
        if event["line"] != line or not event["indices"]:
            continue
        for column in event["columns"][:1]:
            for index, digest in zip(event["indices"], column, strict=False):
                if seen.setdefault(index, digest) != digest:
                    return True
    return False
