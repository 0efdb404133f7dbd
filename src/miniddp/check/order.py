"""Order: do all ranks make the same calls, and does none wait for ever?"""

from collections.abc import Iterator

from miniddp.check.finding import Event, Finding, Run


def find(run: Run) -> Iterator[Finding]:
    if run.all_of_kind("join"):  # ranks may end at different times
        return
    others = [*unfinished(run), *other_calls(run)]
    yield from others
    if run.stuck and not others:
        yield hang(run)


def unfinished(run: Run) -> Iterator[Finding]:
    """A wrapper has waited in vain for gradients of its last pass.

    Not if parameters that it does not know have some: they took their place.
    """
    if any(event["unsent"] for event in run.all_of_kind("step")):
        return
    for rank in run.ranks:
        for event in run.of_kind(rank, "unfinished"):
            yield run.found("unused parameters", event, ranks=[rank], rank=rank)


def other_calls(run: Run) -> Iterator[Finding]:
    """The first call of a group in which two of its ranks differ."""
    groups: dict[str, dict[int, list[Event]]] = {}
    for rank in run.ranks:
        for event in run.of_kind(rank, "collective"):
            calls = groups.setdefault(event["group"], {})
            calls.setdefault(rank, []).append(event)
    for calls in groups.values():
        for events in zip(*calls.values(), strict=False):
            peers = dict(zip(calls, events, strict=True))
            one, first = next(iter(peers.items()))
            for other, event in peers.items():
                if call(event) != call(first):
                    yield run.found(
                        "other calls",
                        first,
                        ranks=[one, other],
                        call=call(first),
                        line=first["line"],
                        other_call=call(event),
                        other_line=event["line"],
                    )
                    return


def call(event: Event) -> str:
    shape = f" of {event['shape']}" if event["shape"] else ""
    return f"{event['operation']}{shape}"


def hang(run: Run) -> Finding:
    """No rank moves any more."""
    waiting = [rank for rank in run.ranks if run.stuck[rank]["place"]]
    gone = [rank for rank in run.ranks if run.stuck[rank]["is_done"]]
    places = [f"rank {rank} has ended" for rank in gone]
    for rank in waiting:
        stack = " < ".join(run.stuck[rank]["stack"][:3])
        what = call(run.stuck[rank]["place"])
        places.append(f"rank {rank} waits in {what} ({stack})")
    lines = [str(line) for line in run.stuck[waiting[0]]["stack"]]
    event = {
        "step": len(run.of_kind(waiting[0], "step")),
        "line": lines[0].split(" in ")[0] if lines else "",
    }
    name = "a rank has left" if gone else "a hang"
    ranks = gone or waiting
    return run.found(name, event, ranks=ranks, places="; ".join(places))
