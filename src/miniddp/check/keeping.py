"""Keeping: who writes files, and who can read them?"""

from collections.abc import Iterator
from pathlib import Path

from miniddp.check.finding import Event, Finding, Run, found


def find(run: Run) -> Iterator[Finding]:
    yield from written_twice(run)
    yield from onto_one_gpu(run)


def written_twice(run: Run) -> Iterator[Finding]:
    """Two ranks of a machine write the same file."""
    writers: dict[tuple[str, str], dict[int, Event]] = {}
    for rank in run.ranks:
        for event in run.of_kind(rank, "save"):
            file = (event["host"], event["path"])
            writers.setdefault(file, {})[rank] = event
    for (_, path), events in writers.items():
        if len(events) < 2 or path.startswith("/dev/"):
            continue
        event = next(iter(events.values()))
        name = Path(path).name
        yield found("every rank saves", event, list(events), file=name)
        return


def onto_one_gpu(run: Run) -> Iterator[Finding]:
    """A checkpoint's tensors land on the GPU of the rank that saved them."""
    for rank in run.ranks:
        for event in run.of_kind(rank, "load"):
            yield found(
                "no map_location",
                event,
                [rank],
                here=event["here"],
                elsewhere=event["elsewhere"][0],
            )
            return
