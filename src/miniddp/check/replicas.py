"""Replicas: do all ranks hold the same weights, buffers and state?"""

from collections.abc import Iterator

from miniddp.check.finding import (
    Event,
    Finding,
    Run,
    equal,
    first_difference,
    found,
)

PASSES = 2
STEPS_OF_STATISTICS = 8
FAR_APART = 0.15
"""In standard deviations, between the running means of two ranks."""


def find(run: Run) -> Iterator[Finding]:
    if not run.reunites():
        unwrapped = list(not_wrapped(run))
        yield from unwrapped or weights(run)
    yield from never_steps(run)
    yield from left_out(run)
    yield from buffers(run)
    yield from statistics(run)


def not_wrapped(run: Run) -> Iterator[Finding]:
    """Gradients differ, and nothing in the program would average them."""
    averages = run.all_of_kind("wrap") + run.all_of_kind("point to point")
    averages += [e for e in run.all_of_kind("collective") if "gradient" in e]
    steps = list(run.replicas())
    for peers in steps:
        name = first_difference(peers, "gradients")
        if averages or name is None:
            continue
        is_split = any(e["num_replicas"] for e in run.all_of_kind("epoch"))
        began_equal = first_difference(steps[0], "weights") is None
        if not is_split and not began_equal and shares_a_model(run):
            return
        sure = "certain" if is_split or began_equal else "likely"
        first = peers[0]
        yield found("not wrapped", first, first["ranks"], sure, name=name)
        return


def shares_a_model(run: Run) -> bool:
    """Whether the ranks send tensors in training: perhaps parts of a model."""
    collectives = run.all_of_kind("collective")
    return any(e["step"] > 0 and e.get("elements", 1) > 1 for e in collectives)


def weights(run: Run) -> Iterator[Finding]:
    """They differ, though the gradients of all steps before were equal."""
    before: tuple[Event, ...] = ()
    for peers in run.replicas():
        first = peers[0]
        ranks = first["ranks"]
        gradients = first_difference(peers, "gradients")
        if gradients is not None and not first["is_wrapped"]:
            return
        name = first_difference(peers, "weights")
        if name is not None and lacks_state(before):
            lacking = "one rank has loaded what others have not"
            yield found("optimizer state differs", first, ranks, name=lacking)
            return
        if name is not None and before:
            since = before[0]["step"]
            yield found("weights differ", first, ranks, since=since, name=name)
            return
        if name is not None:
            kind = "other weights from the start"
            if first["is_wrapped"]:
                kind = "weights changed after wrapping"
            yield found(kind, first, ranks, name=name)
            return
        if gradients is not None:
            return
        state = first_difference(with_same_state(peers), "state")
        if state is not None:
            yield found("optimizer state differs", first, ranks, name=state)
            return
        if not equal(peers, "settings"):
            differing = differing_settings(peers)
            yield found("settings differ", first, ranks, differing=differing)
            return
        before = peers


def lacks_state(peers: tuple[Event, ...]) -> bool:
    """Whether a rank holds the state of other parameters than the rest."""
    states = [sorted(event.get("state", {})) for event in peers]
    return any(state != states[0] for state in states)


def with_same_state(peers: tuple[Event, ...]) -> tuple[Event, ...]:
    """Of what all ranks hold: some optimizers hold a part of the state each."""
    states = [event.get("state", {}) for event in peers]
    shared = set.intersection(*map(set, states))
    return tuple(
        {"state": {name: state[name] for name in sorted(shared)}}
        for state in states
    )


def differing_settings(peers: tuple[Event, ...]) -> str:
    differing = []
    for number, settings in enumerate(peers[0]["settings"]):
        for key in settings:
            values = [event["settings"][number].get(key) for event in peers]
            if len(set(values)) > 1:
                differing.append(f"{key} is {', '.join(map(str, values))}")
    return "; ".join(differing[:3])


def never_steps(run: Run) -> Iterator[Finding]:
    """A rank computes gradients, and only others use theirs."""
    steps = run.all_of_kind("step")
    for rank in run.ranks:
        backwards = run.of_kind(rank, "backward")
        if run.of_kind(rank, "step") or len(backwards) < PASSES:
            continue
        if len(steps) >= PASSES and not run.stuck:
            yield found("a rank never steps", backwards[-1], [rank], rank=rank)
            return


def left_out(run: Run) -> Iterator[Finding]:
    """A wrapped parameter has a gradient, and no optimizer changes it."""
    steps = [e for e in run.of_kind(0, "step") if "left_out" in e]
    for step in steps[-1:]:
        names = step["left_out"]
        if names:
            yield found(
                "left out of the optimizer",
                step,
                run.ranks,
                "likely",
                count=len(names),
                names=", ".join(names[:3]),
            )


def buffers(run: Run) -> Iterator[Finding]:
    if any(event["sends_buffers"] for event in run.all_of_kind("wrap")):
        return
    for peers in run.side_by_side("forward"):
        if not all("buffers" in event for event in peers):
            continue
        name = first_difference(peers, "buffers")
        if name is not None:
            yield found("buffers differ", peers[0], run.ranks, name=name)
            return


def statistics(run: Run) -> Iterator[Finding]:
    """Batch normalisation sees other data on each rank, and keeps rank 0's."""
    steps_apart = 0
    for peers in run.side_by_side("forward"):
        values = [
            event["statistics"] for event in peers if "statistics" in event
        ]
        if len(values) < len(run.ranks) or not all(values):
            continue
        steps_apart = steps_apart + 1 if are_apart(values) else 0
        if steps_apart == STEPS_OF_STATISTICS:
            yield found("statistics of one rank", peers[0], run.ranks, "likely")
            return


def are_apart(values: list[list[list[float]]]) -> bool:
    """In most channels, ranks 0 and 1: means, in standard deviations."""
    means, variances = values[0]
    others = values[1][0]
    far = [
        abs(mean - other) > FAR_APART * max(variance, 1e-12) ** 0.5
        for mean, other, variance in zip(means, others, variances, strict=True)
    ]
    return far.count(True) > len(far) / 2
