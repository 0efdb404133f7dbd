"""Random numbers: do the ranks draw alike where they should not?"""

from collections.abc import Iterator
from itertools import chain

from miniddp.check.data import is_sliced
from miniddp.check.epochs import epochs
from miniddp.check.finding import Event, Finding, Run
from miniddp.check.gradients import gathers

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
    are_shared = any(is_sliced(run, epoch) for epoch in epochs(run))
    if len(batches) >= TIMES and not are_shared:
        yield run.found("augmented alike", batches[0])


def drawn_alike(run: Run, kind: str) -> Iterator[Event]:
    """Where a generator was used, and was equal on all ranks before."""
    for peers in run.side_by_side(kind):
        if set.intersection(*(set(event["drawn"]) for event in peers)):
            yield peers[0]


def inputs(run: Run) -> Iterator[Finding]:
    """One input is equal on all ranks, another is not: noise, or timesteps."""
    alike: dict[tuple[int, str, int], set[str]] = {}
    differing = set()
    local = [step for step in run.steps if not any(map(gathers, step.before))]
    rows = [zip(*step.of_kind("forward"), strict=False) for step in local]
    for peers in chain.from_iterable(rows):
        columns = zip(*[event["inputs"] for event in peers], strict=False)
        for number, column in enumerate(columns):
            place = (peers[0]["wrapper"], peers[0]["line"], number)
            if is_drawn_alike(column):
                alike.setdefault(place, set()).add(str(column))
            else:
                differing.add(place)
    for place, values in alike.items():
        if differing and place not in differing and len(values) >= BATCHES:
            passes = run.of_kind(0, "forward")
            event = next(e for e in passes if e["line"] == place[1])
            yield run.found("same random numbers", event, sure="likely")


def is_drawn_alike(column: tuple[list[int], ...]) -> bool:
    """The same on all ranks, and not the same for all samples."""
    return len(set(map(tuple, column))) == 1 and len(set(column[0])) > 1
