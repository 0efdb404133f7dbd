"""What is found, and the notes of all ranks in which it is found."""

import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Event = dict[str, Any]
"""One thing that a rank did: its `kind`, its `step`, its `line`, and more."""
TABLE = tomllib.loads(
    Path(__file__).with_name("findings.toml").read_text(encoding="utf-8")
)


class Finding(NamedTuple):
    """One thing that is wrong; the table says what its fields mean."""

    name: str
    severity: int
    sure: str
    ranks: tuple[int, ...]
    step: int
    line: str
    text: str
    remedy: str
    page: str


def found(
    kind: str,
    event: Event,
    ranks: Sequence[int],
    sure: str = "certain",
    **facts: object,
) -> Finding:
    """The finding of this name at an event, its text filled with `facts`.

    `sure` is "certain" if it was seen, "likely" if it can be read otherwise.
    """
    entry = TABLE[kind]
    return Finding(
        kind,
        entry["severity"],
        sure,
        tuple(ranks),
        event["step"],
        event["line"],
        entry["text"].format(**facts),
        entry["remedy"].format(**facts),
        entry["page"],
    )


class Run:
    """The events of every rank, `events[rank]`, in the order of each."""

    def __init__(self, events: list[list[Event]], stuck: list[Event]) -> None:
        self.events = events
        self.stuck = stuck
        """Where each rank is, if the job hangs; else empty."""
        self.ranks = range(len(events))

    def of_kind(self, rank: int, kind: str) -> list[Event]:
        return [event for event in self.events[rank] if event["kind"] == kind]

    def all_of_kind(self, kind: str) -> list[Event]:
        return [e for rank in self.ranks for e in self.of_kind(rank, kind)]

    def side_by_side(self, kind: str) -> Iterator[tuple[Event, ...]]:
        """The first of each rank, then the second, while all have one."""
        events = [self.of_kind(rank, kind) for rank in self.ranks]
        return zip(*events, strict=False)

    def replicas(self) -> Iterator[tuple[Event, ...]]:
        """The optimizer steps of the ranks that hold the same replica."""
        for events in self.side_by_side("step"):
            for members in sorted({tuple(event["ranks"]) for event in events}):
                peers = tuple(events[rank] for rank in members)
                if len(peers) > 1 and equal(peers, "optimizer"):
                    yield peers

    def is_joined(self) -> bool:
        """Whether torch's `Join` lets ranks end at different times."""
        return bool(self.all_of_kind("join"))

    def is_data_parallel(self) -> bool:
        """Whether all ranks hold one replica, none of them a part of it."""
        whole = tuple(self.ranks)
        steps = self.all_of_kind("step")
        are_whole = all(tuple(event["ranks"]) == whole for event in steps)
        return are_whole and not self.all_of_kind("point to point")

    def reunites(self) -> bool:
        """Whether weights part and are equal later: by the program's plan."""
        differed = False
        for peers in self.replicas():
            differs = first_difference(peers, "weights") is not None
            if differed and not differs:
                return True
            differed = differs
        return False


def first_difference(events: tuple[Event, ...], what: str) -> str | None:
    """The name of the first tensor of which the ranks hold another digest."""
    for name in events[0][what]:
        if len({event[what].get(name) for event in events}) > 1:
            return str(name)
    return None


def equal(events: Sequence[Event], key: str) -> bool:
    return all(event[key] == events[0][key] for event in events)
