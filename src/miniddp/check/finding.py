"""What is found, and the notes of all ranks in which it is found."""

import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Event = dict[str, Any]
"""One thing that a rank did: its `kind`, its `step`, its `line`, and more."""
Peers = tuple[Event, ...]
"""The same event of several ranks."""
WORDS = tomllib.loads(
    Path(__file__).with_name("findings.toml").read_text(encoding="utf-8")
)
PASSES = ("forward", "backward")
SEVERITIES = list(WORDS)
TABLE = {
    kind: {"severity": severity, **words}
    for severity, kinds in WORDS.items()
    for kind, words in kinds.items()
}


class Finding(NamedTuple):
    """One thing that is wrong; the table says what its fields mean."""

    name: str
    severity: str
    sure: str
    ranks: tuple[int, ...]
    step: int
    line: str
    text: str
    remedy: str
    page: str


class Step(NamedTuple):
    """A step of an optimizer on the ranks that hold the same replica."""

    peers: Peers
    before: tuple[list[Event], ...]
    """What each of them has done since its last step."""

    def of_kind(self, kind: str) -> list[list[Event]]:
        return [
            [event for event in events if event["kind"] == kind]
            for events in self.before
        ]


class Run:
    """The events of every rank, `events[rank]`, in the order of each."""

    def __init__(self, events: list[list[Event]], stuck: list[Event]) -> None:
        self.events = events
        self.stuck = stuck
        """Where each rank is, if the job hangs; else empty."""
        self.ranks = range(len(events))
        if any(map(is_exchange, self.all_of_kind("collective"))):
            self.leave_out_own_parts()
        self.steps = list(self.find_steps())
        self.partings = list(self.find_partings())

    def found(self, kind: str, event: Event, /, **facts: Any) -> Finding:
        """This finding at an event, its words filled with `facts`.

        Of all ranks, if the facts name no `ranks`. It is `sure` "certain" if
        it was seen, "likely" if it can be read otherwise.
        """
        words = TABLE[kind]
        return Finding(
            name=kind,
            severity=words["severity"],
            sure=facts.get("sure", words.get("sure", "certain")),
            ranks=tuple(facts.get("ranks", self.ranks)),
            step=event["step"],
            line=event["line"],
            text=words["text"].format(**facts),
            remedy=words["remedy"].format(**facts),
            page=words["page"],
        )

    def of_kind(self, rank: int, kind: str) -> list[Event]:
        return [event for event in self.events[rank] if event["kind"] == kind]

    def all_of_kind(self, kind: str) -> list[Event]:
        return [
            event for rank in self.ranks for event in self.of_kind(rank, kind)
        ]

    def side_by_side(self, kind: str) -> Iterator[Peers]:
        """The first of each rank, then the second, while all have one."""
        events = [self.of_kind(rank, kind) for rank in self.ranks]
        return zip(*events, strict=False)

    def find_steps(self) -> Iterator[Step]:
        leads = zip(*map(lead_to_steps, self.events), strict=False)
        for events, before in zip(
            self.side_by_side("step"), leads, strict=False
        ):
            for ranks in sorted({tuple(event["ranks"]) for event in events}):
                peers = tuple(events[rank] for rank in ranks)
                if len(peers) > 1 and equal(peers, "optimizer"):
                    yield Step(peers, tuple(before[rank] for rank in ranks))

    def find_partings(self) -> Iterator[Step]:
        """The steps whose gradients differ, and after which weights do too.

        Where weights are equal after them, the optimizer averages by itself.
        """
        differing = set()
        for number, step in enumerate(self.steps):
            if first_difference(step.peers, "gradients") is None:
                continue
            optimizer = step.peers[0]["optimizer"]
            has_parted = optimizer not in differing
            differing.add(optimizer)
            for later, _ in self.steps[number + 1 :]:
                if later[0]["optimizer"] == optimizer:
                    weight = first_difference(later, "weights")
                    has_parted = weight is not None
                    break
            if has_parted:
                yield step

    def leave_out_own_parts(self) -> None:
        """As tables of DLRM, experts, or the classes of a last layer.

        The other ranks get what these make of their samples, and send back
        gradients.
        """
        own: dict[int, set[str]] = {}
        for peers in self.side_by_side("step"):
            own.setdefault(peers[0]["optimizer"], own_parts(peers))
        for event in self.all_of_kind("step"):
            names = own.get(event["optimizer"], set())
            for name in names:
                event["weights"].pop(name, None)
                event["gradients"].pop(name, None)  # a sparse one is not there
            for what in list(event["state"]):
                if what.partition(" of ")[2] in names:
                    event["state"].pop(what)
            event["unsent"] = [n for n in event["unsent"] if n not in names]

    def averages_by_hand(self) -> bool:
        calls = self.all_of_kind("collective")
        return any("gradient" in e for e in calls) or self.averages_flat()

    def averages_flat(self) -> bool:
        """Whether between backward and step as many numbers are reduced."""
        for step in self.steps:
            for event in reversed(step.before[0]):
                if event["kind"] == "backward":
                    break
                if event.get("is_flat"):
                    return True
        return False

    def is_data_parallel(self) -> bool:
        """Whether all ranks hold one replica, none of them a part of it."""
        whole = list(self.ranks)
        steps = self.all_of_kind("step")
        are_whole = all(list(event["ranks"]) == whole for event in steps)
        is_split = any(event["is_split"] for event in steps)
        sends = bool(self.all_of_kind("point to point"))
        is_one_model = are_whole and not is_split and not sends
        return is_one_model and not self.is_search()

    def is_search(self) -> bool:
        """Whether each trains a model of its own, with settings of its own."""
        calls = self.all_of_kind("collective")
        if not self.steps or any(map(is_talk, calls)):
            return False
        is_wrapped = bool(self.all_of_kind("wrap"))
        return not is_wrapped and not equal(self.steps[0].peers, "settings")

    def parts_by_plan(self) -> bool:
        """Whether weights may part: in a search, or for some steps.

        They are sent themselves, or equal again after the ranks have talked:
        without that, all may have loaded a checkpoint.
        """
        calls = self.all_of_kind("collective")
        is_sent = any(e.get("is_weight") and e["step"] for e in calls)
        if is_sent or self.is_search():
            return True
        have_talked: dict[int, bool] = {}
        for peers, before in self.steps:
            optimizer = peers[0]["optimizer"]
            if any(map(is_talk, before[0])):
                have_talked = dict.fromkeys(have_talked, True)
            if first_difference(peers, "weights") is not None:
                have_talked.setdefault(optimizer, False)
            elif have_talked.pop(optimizer, False):
                return True
        return False


def is_talk(event: Event) -> bool:
    """Whether it may carry weights: a collective with a tensor."""
    if event["kind"] != "collective" or not event["by_script"]:
        return False
    operation = event["operation"]
    return "barrier" not in operation and "object" not in operation


def is_exchange(event: Event) -> bool:
    """Whether it may send what layers make, or gradients of that."""
    is_in_backward = event.get("in_backward") and "gradient" not in event
    return bool(is_in_backward) or "all_to_all" in event["operation"]


def own_parts(peers: Peers) -> set[str]:
    """Parameters that no wrapper has, and that begin otherwise on each rank."""
    return {
        name
        for peer in peers
        if peer["is_wrapped"]
        for name in peer["unsent"]
        if any(p["weights"].get(name) != peer["weights"][name] for p in peers)
    }


def lead_to_steps(events: list[Event]) -> Iterator[list[Event]]:
    """For each step what was done before, with its passes, if not zeroed."""
    led: list[Event] = []
    since: list[Event] = []
    for event in events:
        if event["kind"] == "step":
            have_passed = any(e["kind"] in PASSES for e in since)
            led = since if have_passed else led + since
            yield led
            since = []
            continue
        if event["kind"] == "zero":
            since = [e for e in since if e["kind"] != "backward"]
        since.append(event)


def first_difference(
    events: Sequence[Event], what: str, of_all: bool = False
) -> str | None:
    """The name of the first tensor of which the ranks hold another digest.

    `of_all`: of those that every rank has; else a lack is a difference.
    """
    for name in dict.fromkeys(name for event in events for name in event[what]):
        digests = [event[what].get(name, [None])[0] for event in events]
        if of_all and None in digests:
            continue
        if any(digest != digests[0] for digest in digests):
            return str(name)
    return None


def equal(events: Sequence[Event], key: str) -> bool:
    return all(event[key] == events[0][key] for event in events)


def are_same(rows: Sequence[Sequence[Event]], key: str, at_least: int) -> bool:
    """On all ranks in each row, with so many different values at least."""
    values = {str(row[0][key]) for row in rows}
    return len(values) >= at_least and all(equal(row, key) for row in rows)
