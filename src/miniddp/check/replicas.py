"""Replicas: do all ranks hold the same weights, buffers and state?"""

from collections import Counter
from collections.abc import Iterator

from miniddp.check.finding import (
    Event,
    Finding,
    Peers,
    Run,
    equal,
    first_difference,
)

PASSES = 2
STEPS_OF_STATISTICS = 8
LOADED = "one rank has loaded what others have not"
FAR_APART = 0.15
"""In standard deviations, between the running means of two ranks."""


def find(run: Run) -> Iterator[Finding]:
    if not run.parts_by_plan():
        unwrapped = list(not_wrapped(run))
        yield from unwrapped or weights(run)
    yield from never_steps(run)
    yield from left_out(run)
    yield from buffers(run)
    yield from statistics(run)
    yield from modes(run)


def not_wrapped(run: Run) -> Iterator[Finding]:
    """Gradients differ, and nothing in the program would average them."""
    others = ("wrap", "point to point")
    if run.averages_by_hand() or any(map(run.all_of_kind, others)):
        return
    collectives = run.all_of_kind("collective")
    is_split = any(e["num_replicas"] for e in run.all_of_kind("epoch"))
    sends = any(e["step"] > 0 and e["elements"] > 1 for e in collectives)
    for peers, _ in run.partings:
        name = first_difference(peers, "gradients")
        began_equal = first_difference(run.steps[0].peers, "weights") is None
        is_sure = is_split or began_equal
        if sends and not is_sure:  # parts of a model?
            continue
        ranks = peers[0]["ranks"]
        sure = "certain" if is_sure else "likely"
        yield run.found(
            "not wrapped", peers[0], ranks=ranks, sure=sure, name=name
        )


def weights(run: Run) -> Iterator[Finding]:
    """They differ, though the gradients of all steps before were equal."""
    before: dict[int, Peers] = {}
    for peers, _ in run.steps:
        event = peers[0]
        ranks = event["ranks"]
        gradient = first_difference(peers, "gradients")
        if gradient is not None and not event["is_wrapped"]:
            return
        name = first_difference(peers, "weights")
        if name is not None:
            yield parted(run, peers, before.get(event["optimizer"]), name)
            return
        if gradient is not None:
            return
        state = first_difference(peers, "state", of_all=True)
        if not equal(peers, "settings") and has_loaded_alone(peers):
            state = LOADED
        if state is not None:
            kind = "optimizer state differs"
            yield run.found(kind, event, ranks=ranks, name=state)
            return
        if not equal(peers, "settings"):
            text = differing_settings(peers)
            yield run.found("settings differ", event, ranks=ranks, text=text)
            return
        before[event["optimizer"]] = peers


def parted(run: Run, peers: Peers, before: Peers | None, name: str) -> Finding:
    """How it comes that weights differ, and did not in the step before."""
    event = peers[0]
    ranks = event["ranks"]
    if before is None:
        kind = "other weights from the start"
        if event["is_wrapped"]:
            kind = "weights changed after wrapping"
        return run.found(kind, event, ranks=ranks, name=name)
    if has_loaded_alone(before):
        kind = "optimizer state differs"
        return run.found(kind, event, ranks=ranks, name=LOADED)
    since = before[0]["step"]
    return run.found(
        "weights differ", event, ranks=ranks, since=since, name=name
    )


def has_loaded_alone(peers: Peers) -> bool:
    return len({tuple(peer["state"]) for peer in peers}) > 1


def differing_settings(peers: Peers) -> str:
    differing = []
    for settings in zip(*[peer["settings"] for peer in peers], strict=False):
        for key in settings[0]:
            values = [of_rank.get(key, "nothing") for of_rank in settings]
            if len(set(values)) > 1:
                differing.append(f"{key} is {', '.join(values)}")
    return "; ".join(differing[:3])


def never_steps(run: Run) -> Iterator[Finding]:
    """A rank computes gradients, and only others use theirs."""
    if run.stuck or len(run.all_of_kind("step")) < PASSES:
        return
    for rank in run.ranks:
        passes = run.of_kind(rank, "backward")
        if run.of_kind(rank, "step") or gets_weights(run.events[rank]):
            continue
        if len(passes) >= PASSES:
            yield run.found("steps left out", passes[-1], ranks=[rank])


def gets_weights(events: list[Event]) -> bool:
    """Whether something is broadcast after a backward pass."""
    calls = [str(e.get("operation", e["kind"])) for e in events]
    later = calls[calls.index("backward") :] if "backward" in calls else []
    return any(call.startswith("broadcast") for call in later)


def left_out(run: Run) -> Iterator[Finding]:
    """Wrapped parameters that have a gradient, and that no step changes."""
    looks = [e for e in run.of_kind(0, "step") if "left_out" in e]
    if len(looks) < 2:
        return
    before = looks[0]["left_out"]
    after = looks[-1]["left_out"]
    names = [name for name in after if before.get(name) == after[name]]
    if names:
        kind = "left out of the optimizer"
        shown = ", ".join(names[:3])
        yield run.found(kind, looks[-1], count=len(names), names=shown)


def buffers(run: Run) -> Iterator[Finding]:
    """Noted only of wrappers that are told not to send them.

    Not where they are equal again later: the program averages them.
    """
    found = None
    for peers in run.side_by_side("forward"):
        if all("buffers" in event for event in peers):
            name = first_difference(peers, "buffers")
            if name is None and found:
                return
            if name is not None and not found:
                found = run.found("buffers differ", peers[0], name=name)
    if found:
        yield found


def statistics(run: Run) -> Iterator[Finding]:
    """Batch normalisation sees other data on each rank, and keeps rank 0's."""
    steps_apart: Counter[int] = Counter()
    for peers in run.side_by_side("forward"):
        values = [event.get("statistics", []) for event in peers]
        if not all(values):
            continue
        steps_apart.update(channels_apart(*values[:2]))
        if STEPS_OF_STATISTICS in steps_apart.values():
            yield run.found("statistics of one rank", peers[0])


def channels_apart(
    one: list[list[float]], other: list[list[float]]
) -> list[int]:
    """Whose means are far apart, in standard deviations."""
    channels = zip(one[0], other[0], one[1], strict=True)
    return [
        number
        for number, (mean, other_mean, variance) in enumerate(channels)
        if abs(mean - other_mean) > FAR_APART * max(variance, 1e-12) ** 0.5
    ]


def modes(run: Run) -> Iterator[Finding]:
    """One rank trains in `eval()`, the others do not."""
    found = []
    for step in run.steps:
        passes = [
            [event for event in events if event["mode"]]
            for events in step.of_kind("forward")
        ]
        for peers in zip(*passes, strict=False):
            if not equal(peers, "mode"):
                found.append(peers)
    if len(found) >= PASSES:
        peers = found[0]
        ranks = step.peers[0]["ranks"]
        modes_of_ranks = ", ".join(event["mode"] for event in peers)
        yield run.found(
            "modes differ", peers[0], ranks=ranks, modes=modes_of_ranks
        )
