"""Gradients: is what the optimizer gets the mean over all ranks?"""

from collections.abc import Iterator

from miniddp.check.finding import (
    Event,
    Finding,
    Run,
    Step,
    equal,
    first_difference,
)

STEPS = 3
"""So many steps without a gradient are no accident."""
TOLERANCE = 1e-3
"""Of a sum over ranks, to the sum of the numbers' sizes."""


def find(run: Run) -> Iterator[Finding]:
    if not run.parts_by_plan():
        yield from not_averaged(run)
    for step in run.steps:
        yield from clipped_too_early(run, step)
        yield from averaged_twice(run, step)
        yield from summed(run, step)
        yield from not_finite(run, step)
    yield from without_gradients(run)
    yield from clipped_while_scaled(run)
    yield from micro_batches(run)


def not_averaged(run: Run) -> Iterator[Finding]:
    for step in run.partings:
        event = step.peers[0]
        if not event["is_wrapped"] and not run.averages_by_hand():
            continue
        name = first_difference(step.peers, "gradients")
        passes = step.of_kind("backward")[0] or [event]
        yield run.found(
            why(run, step),
            event,
            ranks=event["ranks"],
            name=(event["unsent"] or [name])[0],
            line=passes[-1]["line"],
        )
        return


def why(run: Run, step: Step) -> str:
    """The name of the finding that explains why a gradient differs."""
    forwards = step.of_kind("forward")
    backwards = step.of_kind("backward")
    if not equal(step.peers, "passes"):
        return "steps left out"
    if any(event["in_backward"] for event in step.peers):
        return "step inside backward"
    if not step.peers[0]["is_wrapped"]:
        return "gradients differ" if run.averages_flat() else "averaged in part"
    is_around = any(event["is_around"] for event in step.peers)
    if any(event["unsent"] for event in step.peers):
        return "not in the mean"
    if is_around or not all(forwards):
        return "around the wrapper"
    if not any(event["averages"] for event in run.all_of_kind("wrap")):
        return "no sync_gradients"
    if not all(events[-1]["will_send"] for events in forwards):
        are_alone = all(map(is_backward_alone, step.before))
        return "around the wrapper" if are_alone else "step inside no_sync"
    if any(len(passes) > 1 and not passes[-1]["sends"] for passes in backwards):
        return "a backward alone"
    return "gradients differ"


def is_backward_alone(events: list[Event]) -> bool:
    """Whether the last backward pass had no forward pass of a wrapper."""
    kinds = [event["kind"] for event in events]
    passes = [kind for kind in kinds if kind in ("forward", "backward")]
    return passes[-2:] == ["backward", "backward"]


def without_gradients(run: Run) -> Iterator[Finding]:
    """All steps of an optimizer, though there are backward passes."""
    by_optimizer: dict[int, list[Event]] = {}
    for event in run.of_kind(0, "step"):
        by_optimizer.setdefault(event["optimizer"], []).append(event)
    for events in by_optimizer.values():
        first = events[0]
        last = events[-1]
        is_idle = not any(event["gradients"] for event in events)
        has_passed = last["passes"] - first["passes"] >= STEPS
        stays = first["weights"] and first["weights"] == last["weights"]
        if is_idle and has_passed and stays and first["trains"]:
            kind = "steps without gradients"
            yield run.found(kind, last, count=len(events))


def clipped_too_early(run: Run, step: Step) -> Iterator[Finding]:
    """They differ when they are clipped, and are equal when they are used."""
    are_averaged = first_difference(step.peers, "gradients") is None
    for clips in zip(*step.of_kind("clip"), strict=False):
        name = first_difference(clips, "gradients")
        if are_averaged and name in step.peers[0]["gradients"]:
            yield run.found("clipped before the mean", clips[0], name=name)


def clipped_while_scaled(run: Run) -> Iterator[Finding]:
    for event in run.of_kind(0, "clip"):
        if event["is_scaled"]:
            yield run.found("clipped while scaled", event)


def averaged_twice(run: Run, step: Step) -> Iterator[Finding]:
    """A gradient is all-reduced, and all ranks hold the same already."""
    for peers in zip(*step.of_kind("collective"), strict=False):
        are_gradients = all("gradient" in peer for peer in peers)
        if not are_gradients or not step.peers[0]["is_wrapped"]:
            continue
        if first_difference(peers, "before") is None:
            name = peers[0]["gradient"]
            yield run.found("averaged twice", peers[0], name=name)


def summed(run: Run, step: Step) -> Iterator[Finding]:
    """What is used is the sum of what the backwards of means have left."""
    backwards = [passes[-1] for passes in step.of_kind("backward") if passes]
    talks = step.of_kind("collective")[0]
    in_backward = any(event.get("in_backward") for event in talks)
    if in_backward or any(map(gathers, step.before)):
        return
    are_means = [event["is_mean"] for event in backwards]
    if are_means.count(True) < len(step.peers):
        return
    used = (step.of_kind("clip")[0] or step.peers)[-1]["gradients"]
    if is_sum(used, backwards):
        name = next(iter(used))
        yield run.found("summed, not averaged", step.peers[0], name=name)


def gathers(events: list[Event]) -> bool:
    """Whether a loss may be that of all ranks' samples."""
    operations = [event.get("operation", "") for event in events]
    return any("gather" in operation for operation in operations)


def is_sum(used: Event, backwards: list[Event]) -> bool:
    """Whether what these have left was added up, and unscaled, then used.

    By the sums of elements, of which one at least must not vanish.
    """
    is_clear = False
    for name, (_, value) in used.items():
        left = [
            event.get("gradients", {}).get(name, [0, None])
            for event in backwards
        ]
        terms = [term for _, term in left]
        if value is None or None in terms:
            return False
        unscaled = [term / backwards[0]["scale"] for term in terms]
        total = sum(unscaled)
        tolerance = TOLERANCE * sum(map(abs, unscaled))
        if abs(value - total) > tolerance:
            return False
        is_clear = is_clear or abs(total) > 10 * tolerance
    return is_clear


def not_finite(run: Run, step: Step) -> Iterator[Finding]:
    """Up to a step with such a gradient a rank had such a loss."""
    event = step.peers[0]
    if None not in [total for _, total in event["gradients"].values()]:
        return
    for rank in event["ranks"]:
        passes = run.of_kind(rank, "backward")
        losses = [e["loss"] for e in passes if e["step"] <= event["step"]]
        if any(loss and loss["value"][1] is None for loss in losses):
            yield run.found("not finite", event, ranks=[rank], rank=rank)


def micro_batches(run: Run) -> Iterator[Finding]:
    """Several backward passes from one place, of one loss, then one step."""
    for step in run.steps:
        event = step.peers[0]
        backwards = step.of_kind("backward")[0]
        forwards = step.of_kind("forward")[0]
        origin = backwards[-1]["origin"] if backwards else ""
        passes = [
            e for e in backwards if e["in_no_sync"] or e["origin"] == origin
        ]
        count = len(passes)
        if count < 2 or event["is_wrapped"] * count > len(forwards):
            continue
        last = passes[-1]
        used = (step.of_kind("clip")[0] or [event])[-1]["gradients"]
        batches = step.of_kind("batch")[0]
        are_tasks = len({e["place"] for e in batches}) > 1
        if not equal(passes, "origin") and len(batches) < count:
            are_tasks = True
        are_means = all(e["is_mean"] for e in passes)
        if are_means and not are_tasks and is_sum(used, [last]):
            yield run.found("loss not divided", last, count=count)
        if all(e["sends"] for e in passes):
            kind = "averaged in every micro-batch"
            yield run.found(kind, last, count=count)
        return
