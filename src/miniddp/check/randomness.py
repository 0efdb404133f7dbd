"""Random numbers: do the ranks draw alike where they should not?"""

from collections.abc import Iterator

from miniddp.check.epochs import epochs
from miniddp.check.finding import Event, Finding, Run, equal

TIMES = 2
"""So often it has to be seen."""
BATCHES = 4
"""So many different ones: labels may be equal by chance."""


def find(run: Run) -> Iterator[Finding]:
    yield from forward(run)
    yield from inputs(run)
    yield from samples(run)
    yield from workers(run)


def forward(run: Run) -> Iterator[Finding]:
    seen = 0
    for peers in run.side_by_side("forward"):
        draws = all(e["is_training"] and e.get("draws") for e in peers)
        seen += draws and equal(peers, "random")
        if seen == TIMES:
            yield run.found("same random numbers", peers[0])


def inputs(run: Run) -> Iterator[Finding]:
    """One input is equal on all ranks, another is not: noise, or timesteps."""
    drawn = set()
    for peers in run.side_by_side("forward"):
        columns = list(zip(*[e["inputs"] for e in peers], strict=False))
        alike = list(filter(is_drawn_alike, columns))
        if not 0 < len(alike) < len(columns):
            return
        drawn.add(str(alike))
        if len(drawn) == BATCHES:
            yield run.found("same random numbers", peers[0], sure="likely")


def is_drawn_alike(column: tuple[list[int], ...]) -> bool:
    """The same on all ranks, and not the same for all samples."""
    return len(set(map(tuple, column))) == 1 and len(set(column[0])) > 1


def samples(run: Run) -> Iterator[Finding]:
    """Made by chance in the ranks' own processes, with the same numbers."""
    seen = 0
    for peers in run.side_by_side("fetch"):
        seen += bool(set.intersection(*(set(e["drawn"]) for e in peers)))
        if seen == TIMES:
            yield run.found("augmented alike", peers[0])


def workers(run: Run) -> Iterator[Finding]:
    """The data loaders' seeds are equal, and samples are made by chance."""
    for epoch in epochs(run):
        have_workers = all(event["workers"] > 0 for event in epoch.peers)
        if not have_workers or not equal(epoch.peers, "base_seed"):
            continue
        first = epoch.peers[0]
        batches = run.of_kind(0, "batch")
        if differ([e for e in batches if e["line"] == first["line"]]):
            yield run.found("augmented alike", first)


def differ(batches: list[Event]) -> bool:
    """Whether a sample was another one when it was read again."""
    seen: dict[int, int] = {}
    for event in batches:
        for column in event["columns"][:1]:
            for index, digest in zip(event["indices"], column, strict=False):
                if seen.setdefault(index, digest) != digest:
                    return True
    return False
