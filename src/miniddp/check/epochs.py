"""What each rank has read of its DataLoaders, epoch by epoch."""

from typing import NamedTuple

from miniddp.check.finding import Event, Peers, Run, are_same

BATCHES = 2
"""So many batches have to be equal, and different from each other."""
Samples = list[tuple[int, ...]]
"""Of each its index, -1 if it has none, and a digest of each column."""


class Epoch(NamedTuple):
    """The n-th time that a line goes through a DataLoader, on all ranks."""

    peers: Peers
    batches: list[list[Event]]
    """Of each rank."""
    have_ended: list[bool]
    is_training: bool
    """Whether an optimizer has stepped on the way."""

    def rows(self) -> list[Peers]:
        return list(zip(*self.batches, strict=False))

    def has_same_batches(self) -> bool:
        rows = [row for row in self.rows() if row[0]["columns"]]
        return are_same(rows, "columns", BATCHES)


def epochs(run: Run) -> list[Epoch]:
    by_place = [
        {e["place"]: e for e in run.of_kind(rank, "epoch")}
        for rank in run.ranks
    ]
    batches = [events_by_place(run, rank, "batch") for rank in run.ranks]
    ends = [events_by_place(run, rank, "end of epoch") for rank in run.ranks]
    found = []
    for place, first in by_place[0].items():
        if not all(place in of_rank for of_rank in by_place):
            continue
        later = batches[0].get(place, []) + ends[0].get(place, [])
        found.append(
            Epoch(
                tuple(of_rank[place] for of_rank in by_place),
                [of_rank.get(place, []) for of_rank in batches],
                [place in of_rank for of_rank in ends],
                any(event["step"] > first["step"] for event in later),
            )
        )
    return found


def events_by_place(run: Run, rank: int, kind: str) -> dict[str, list[Event]]:
    by_place: dict[str, list[Event]] = {}
    for event in run.of_kind(rank, kind):
        by_place.setdefault(event["place"], []).append(event)
    return by_place


def samples_of(batches: list[Event]) -> Samples:
    """In the order in which they were read."""
    samples: Samples = []
    for batch in batches:
        size = max(map(len, batch["columns"]), default=0)
        indices = batch["indices"] or [-1] * size
        columns = [c for c in batch["columns"] if len(c) == len(indices)]
        samples += zip(indices, *columns, strict=True)
    return samples
