"""Order: do all ranks make the same calls, and does none wait for ever?"""

from collections.abc import Iterator

from miniddp.check.finding import Event, Finding, Run, found


def find(run: Run) -> Iterator[Finding]:
    if run.is_joined():
        return
    others = list(other_calls(run))
    yield from others
    if run.stuck and not others:
        yield hang(run)


def other_calls(run: Run) -> Iterator[Finding]:
    """The first call of a group in which two of its ranks differ."""
    for group in dict.fromkeys(
        e["group"] for e in run.all_of_kind("collective")
    ):
        calls = {}
        for rank in run.ranks:
            events = run.of_kind(rank, "collective")
            mine = [event for event in events if event["group"] == group]
            if mine:
                calls[rank] = mine
        for peers in zip(*calls.values(), strict=False):
            names = [call(event) for event in peers]
            if len(set(names)) == 1:
                continue
            place = next(i for i, name in enumerate(names) if name != names[0])
            members = list(calls)
            yield found(
                "other calls",
                peers[0],
                [members[0], members[place]],
                one=members[0],
                call=names[0],
                line=peers[0]["line"],
                other=members[place],
                other_call=names[place],
                other_line=peers[place]["line"],
            )
            return


def call(event: Event) -> str:
    shape = f" of {event['shape']}" if event["shape"] else ""
    return f"{event['operation']}{shape}"


def hang(run: Run) -> Finding:
    """No rank moves any more."""
    waiting = [rank for rank in run.ranks if not run.stuck[rank]["is_done"]]
    gone = [rank for rank in run.ranks if run.stuck[rank]["is_done"]]
    places = [f"rank {rank} has ended" for rank in gone]
    for rank in waiting:
        stack = " < ".join(run.stuck[rank]["stack"][:3])
        what = call(run.stuck[rank]["place"])
        places.append(f"rank {rank} waits in {what} ({stack})")
    stack = run.stuck[waiting[0]]["stack"]
    event = {
        "step": len(run.of_kind(waiting[0], "step")),
        "line": stack[0].split(" in ")[0] if stack else "",
    }
    kind = "a rank has left" if gone else "a hang"
    return found(kind, event, gone or waiting, places="; ".join(places))
