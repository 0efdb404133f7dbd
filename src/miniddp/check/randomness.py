"""Random numbers: do the ranks draw alike where they should not?"""

from collections.abc import Iterator

from miniddp.check.finding import Event, Finding, Run

TIMES = 2
"""So often it has to be seen."""
BATCHES = 4
"""So many different ones: labels may be equal by chance."""


def find(run: Run) -> Iterator[Finding]:
    passes = list(drawn_alike(run, "forward"))
    if len(passes) >= TIMES:
        yield run.found("same random numbers", passes[0])
    yield from inputs(run)
    batches = list(drawn_alike(run, "fetch"))
    if len(batches) >= TIMES:
        yield run.found("augmented alike", batches[0])


def drawn_alike(run: Run, kind: str) -> Iterator[Event]:
    """Where a generator was used, and was equal on all ranks before."""
    for peers in run.side_by_side(kind):
        if set.intersection(*(set(event["drawn"]) for event in peers)):
            yield peers[0]


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
