"""Keeping: who writes files, and who can read them?"""

from collections.abc import Iterator
from pathlib import Path

from miniddp.check.finding import Event, Finding, Run


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
        name = Path(path).name
        is_kept = not path.startswith("/dev/") and "lock" not in name
        if len(events) > 1 and is_kept:
            first, *_ = events.values()
            yield run.found("every rank saves", first, ranks=events, file=name)


def onto_one_gpu(run: Run) -> Iterator[Finding]:
    """A checkpoint's tensors land on the GPU of the rank that saved them."""
    for rank in run.ranks:
        for event in run.of_kind(rank, "load"):
            gpu = event["elsewhere"]
            yield run.found("no map_location", event, ranks=[rank], gpu=gpu)
