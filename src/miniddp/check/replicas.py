"""Replicas: do all ranks hold the same weights, buffers and state?"""

from collections.abc import Iterator
from statistics import fmean, variance

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
TIMES_CHANCE = 25
"""The square of a mean, over that which independent samples would have."""


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
        if event["is_wrapped"] and name not in event["unsent"]:
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
    found: dict[int, Finding] = {}
    averaged = set()
    for peers in run.side_by_side("forward"):
        if not all("buffers" in event for event in peers):
            continue
        of_wrapper = peers[0]["wrapper"]
        name = first_difference(peers, "buffers")
        if name is not None:
            finding = run.found("buffers differ", peers[0], name=name)
            found.setdefault(of_wrapper, finding)
        elif of_wrapper in found:
            averaged.add(of_wrapper)
    for of_wrapper, finding in found.items():
        if of_wrapper not in averaged:
            yield finding


def statistics(run: Run) -> Iterator[Finding]:
    """Batch normalisation sees other data on each rank, and keeps rank 0's."""
    by_size: dict[int, list[list[float]]] = {}
    for peers in run.side_by_side("forward"):
        values = [event.get("statistics", []) for event in peers]
        if not all(values) or any("buffers" in event for event in peers):
            continue
        apart = distances(*values[:2])
        passes = by_size.setdefault(len(apart), [])
        passes.append(apart)
        if are_apart(passes[1:]):  # the first is of what all began with
            yield run.found("statistics of one rank", peers[0])


def distances(one: list[list[float]], other: list[list[float]]) -> list[float]:
    """Of the running mean of each channel, in standard deviations."""
    channels = zip(one[0], other[0], one[1], strict=True)
    return [
        (mean - other_mean) / max(variance, 1e-12) ** 0.5
        for mean, other_mean, variance in channels
    ]


def are_apart(passes: list[list[float]]) -> bool:
    """Whether some distance is large, and all are larger than by chance.

    The ranks get the same statistics before each pass, so what they are apart
    after it is of this pass alone.
    """
    if len(passes) < STEPS_OF_STATISTICS:
        return False
    channels = list(zip(*passes, strict=True))
    means = [fmean(channel) for channel in channels]
    squares = [
        mean**2 * len(passes) / max(variance(channel), 1e-12)
        for mean, channel in zip(means, channels, strict=True)
    ]
    return max(map(abs, means)) > FAR_APART and fmean(squares) > TIMES_CHANCE


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
                ranks = step.peers[0]["ranks"]
                text = ", ".join(event["mode"] for event in peers)
                finding = run.found(
                    "modes differ", peers[0], ranks=ranks, modes=text
                )
                found.append(finding)
    if len(found) >= PASSES:
        yield found[0]
