"""Gradients: is what the optimizer gets the mean over all ranks?"""

from collections.abc import Iterator

from miniddp.check.finding import (
    Event,
    Finding,
    Run,
    equal,
    first_difference,
    found,
)


def find(run: Run) -> Iterator[Finding]:
    if not run.reunites():
        yield from not_averaged(run)
    yield from clipped_too_early(run)
    yield from clipped_while_scaled(run)
    yield from by_hand(run)
    yield from not_finite(run)
    yield from micro_batches(run)


def not_averaged(run: Run) -> Iterator[Finding]:
    collectives = run.all_of_kind("collective")
    averages_by_hand = any("gradient" in event for event in collectives)
    for peers in run.replicas():
        first = peers[0]
        name = first_difference(peers, "gradients")
        if name is None or not (first["is_wrapped"] or averages_by_hand):
            continue
        before = [before_step(run.events[r], first) for r in first["ranks"]]
        cause = why(run, peers, before)
        lines = [e["line"] for e in before[0] if e["kind"] == "backward"]
        line = lines[-1] if lines else first["line"]
        name = (first["unsent"] or [name])[0]
        yield found(cause, first, first["ranks"], name=name, line=line)
        return


def why(run: Run, peers: tuple[Event, ...], before: list[list[Event]]) -> str:
    """The name of the finding that explains why a gradient differs."""
    forwards = [[e for e in es if e["kind"] == "forward"] for es in before]
    backwards = [[e for e in es if e["kind"] == "backward"] for es in before]
    if not equal(peers, "passes"):
        return "steps left out"
    if any(event["in_backward"] for event in peers):
        return "step inside backward"
    if not peers[0]["is_wrapped"]:
        return "averaged in part"
    if not all(forwards):
        return "around the wrapper"
    if any(event["unsent"] for event in peers):
        return "not in the mean"
    if not any(event["averages"] for event in run.all_of_kind("wrap")):
        return "no sync_gradients"
    if not all(events[-1]["will_send"] for events in forwards):
        return "step inside no_sync"
    if any(len(es) > 1 and not es[-1]["sends"] for es in backwards):
        return "a backward alone"
    return "gradients differ"


def before_step(events: list[Event], step: Event) -> list[Event]:
    """What led to this step: not its own closure, nor what was zeroed."""
    led: list[Event] = []
    for event in events:
        if event["step"] != step["step"] or event.get("in_step"):
            continue
        if event["kind"] == "step":
            break
        if event["kind"] == "zero":
            led = [e for e in led if e["kind"] != "backward"]
        led.append(event)
    return led


def clipped_too_early(run: Run) -> Iterator[Finding]:
    """They differ when they are clipped, and are equal when they are used."""
    averaged = {
        peers[0]["step"]
        for peers in run.replicas()
        if first_difference(peers, "gradients") is None
    }
    for peers in run.side_by_side("clip"):
        if not {event["step"] for event in peers} <= averaged:
            continue
        name = first_difference(peers, "gradients")
        if name is not None:
            kind = "clipped before the mean"
            yield found(kind, peers[0], run.ranks, name=name)
            return


def clipped_while_scaled(run: Run) -> Iterator[Finding]:
    for event in run.of_kind(0, "clip"):
        if event["is_scaled"]:
            yield found("clipped while scaled", event, run.ranks)
            return


def by_hand(run: Run) -> Iterator[Finding]:
    """Sums over the ranks that nobody divides; means that are taken twice."""
    steps = {event["step"]: event for event in run.of_kind(0, "step")}
    for peers in run.side_by_side("collective"):
        first = peers[0]
        step = steps.get(first["step"])
        if step is None or not all("gradient" in event for event in peers):
            continue
        name = first["gradient"]
        if step["is_wrapped"] and first_difference(peers, "before") is None:
            yield found("averaged twice", first, run.ranks, name=name)
            return
        is_used = step["gradients"].get(name) == first["after"]["it"]
        if first["is_sum"] and is_used and is_of_a_mean(run, first, step):
            kind = "summed, not averaged"
            yield found(kind, first, run.ranks, "likely", name=name)
            return


def is_of_a_mean(run: Run, collective: Event, step: Event) -> bool:
    """Whether a mean's gradient was sent as backward has left it."""
    name = collective["gradient"]
    for event in before_step(run.events[0], step):
        if event["kind"] == "backward" and event["is_mean"]:
            left = event.get("gradients", {}).get(name)
            if left == collective["before"]["it"]:
                return True
    return False


def not_finite(run: Run) -> Iterator[Finding]:
    for step in run.of_kind(0, "step"):
        if step["is_finite"]:
            continue
        for rank in run.ranks:
            before = before_step(run.events[rank], step)
            if any(event.get("is_finite") is False for event in before):
                yield found("not finite", step, [rank], rank=rank)
                return


def micro_batches(run: Run) -> Iterator[Finding]:
    """Several backward passes from one line, then one step."""
    for step in run.of_kind(0, "step"):
        before = before_step(run.events[0], step)
        backwards = [e for e in before if e["kind"] == "backward"]
        passes = [e for e in backwards if e["line"] == backwards[-1]["line"]]
        forwards = [e for e in before if e["kind"] == "forward"]
        if len(passes) < 2 or step["is_wrapped"] * len(passes) > len(forwards):
            continue
        clips = [event for event in before if event["kind"] == "clip"]
        used = (clips or [step])[0]["gradients"]
        last = passes[-1]
        count = len(passes)
        if all(e["is_mean"] for e in passes) and last.get("gradients") == used:
            yield found("loss not divided", last, [0], "likely", count=count)
        if all(event["sends"] for event in passes):
            kind = "averaged in every micro-batch"
            if any(event["is_held_back"] for event in passes):
                kind = "no_sync around backward only"
            yield found(kind, last, [0], count=count)
        return
