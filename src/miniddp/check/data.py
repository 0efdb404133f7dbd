"""Data: does each rank read its own part, all of it, each epoch anew?"""

from collections.abc import Iterator
from itertools import pairwise

from miniddp.check.epochs import BATCHES, Epoch, epochs
from miniddp.check.finding import Event, Finding, Peers, Run, are_same, equal
from miniddp.check.shares import SHARED, overlap

STEPS = 3
"""So many losses or gradients."""


def find(run: Run) -> Iterator[Finding]:
    all_epochs = epochs(run)
    training = [epoch for epoch in all_epochs if epoch.is_training]
    yield from unequal(run, training)
    yield from same_workers(run, all_epochs)
    yield from same_order(run, training)
    if run.is_data_parallel():
        whole = [epoch for epoch in training if not is_sliced(run, epoch)]
        faults = [
            *sampler(run, all_epochs),
            *same_samples(run, whole),
            *overlap(run, whole),
        ]
        yield from faults[:1]


def unequal(run: Run, training: list[Epoch]) -> Iterator[Finding]:
    """One rank has fewer batches: by their number, or because it is out."""
    for epoch in training:
        peers, _, have_ended, _ = epoch
        counts = [event["batches"] for event in peers]
        is_bound_to = all(event["is_read_to_its_end"] for event in peers)
        if run.stuck and not all(have_ended):
            is_bound_to = any(have_ended)
        if all(have_ended) or (run.stuck and None in counts):
            counts = [event["read"] for event in peers]
        if not run.stuck and not meets_others(run.events[0], peers[0]):
            continue
        if None in counts or run.all_of_kind("join") or not is_bound_to:
            continue
        fewest = min(counts)
        rank = counts.index(fewest)
        if fewest < max(counts):
            yield run.found(
                "unequal batches",
                peers[0],
                ranks=[rank],
                sure="certain" if run.stuck else "likely",
                counts=listed(counts),
                fewest=fewest,
                rank=rank,
            )


def meets_others(events: list[Event], epoch: Event) -> bool:
    """Whether a rank makes a collective call between two of its batches."""
    batches = [
        number
        for number, event in enumerate(events)
        if event["kind"] == "batch" and event["place"] == epoch["place"]
    ]
    between = events[batches[0] : batches[-1]] if batches else []
    return any(event["kind"] == "collective" for event in between)


def listed(values: list[int]) -> str:
    return ", ".join(map(str, values))


def sampler(run: Run, all_epochs: list[Epoch]) -> Iterator[Finding]:
    """What the samplers that split the data have been told."""
    size = len(run.ranks)
    for peers, *_ in all_epochs:
        first = peers[0]
        if None in [event["num_replicas"] for event in peers]:
            continue
        seeds = [event["seed"] for event in peers]
        numbers = [event["epoch"] for event in peers]
        fault = ""
        if any(event["num_replicas"] != size for event in peers):
            fault = f"they split for {first['num_replicas']} ranks of {size}"
        elif len({event["rank"] for event in peers}) < size:
            fault = f"all have rank={first['rank']}"
        elif first["shuffle"] and len(set(seeds)) > 1:
            fault = f"they shuffle with the seeds {listed(seeds)}"
        elif first["shuffle"] and len(set(numbers)) > 1:
            fault = f"set_epoch was called with {listed(numbers)}"
        elif name := in_another_order(peers):
            yield run.found("datasets differ", first, name=name)
        if fault:
            yield run.found("samplers that do not split", first, fault=fault)


def in_another_order(peers: Peers) -> str:
    """The name of a list that holds the same on all ranks, in another order."""
    for name, (order, things) in peers[0]["order"].items():
        others = [event["order"].get(name) for event in peers]
        are_same_things = all(o is not None and o[1] == things for o in others)
        if are_same_things and any(o[0] != order for o in others):
            return str(name)
    return ""


def same_samples(run: Run, training: list[Epoch]) -> Iterator[Finding]:
    """In the batches, or in the losses of one line, if none of them differ."""
    candidates = [
        epoch.rows() for epoch in training if epoch.has_same_batches()
    ]
    passes = [local_passes(run.events[rank]) for rank in run.ranks]
    by_line: dict[str, list[Peers]] = {}
    for peers in zip(*passes, strict=False):
        by_line.setdefault(peers[0]["line"], []).append(peers)
    lines = list(by_line.values())
    if all(equal(peers, "given") for rows in lines for peers in rows):
        candidates += [r for r in lines if are_same(r, "given", STEPS)]
    for rows in candidates:
        yield run.found("same samples", rows[0][0])


def is_sliced(run: Run, epoch: Epoch) -> bool:
    """Whether all read the same batches, and each takes its own slice."""
    if not epoch.has_same_batches():
        return False
    first = epoch.batches[0][0]
    events = run.events[0]
    passes = list(run.side_by_side("backward"))
    is_same_loss = are_same(passes, "loss", BATCHES)
    for event in events[events.index(first) :]:
        if event["kind"] == "forward":
            is_part = event["largest"] * len(run.ranks) <= first["largest"]
            has_drawn = event["drawn"] or event["random"] != first["random"]
            may_differ = has_drawn or first["are_named"]
            return is_part or not (is_same_loss or may_differ)
    return not is_same_loss


def local_passes(events: list[Event]) -> list[Event]:
    """The backward passes before which, since a step, no ranks have talked.

    `given` is the loss. If it says too little, since it has 16 bits or chance
    had a part in it, it is what the wrapper was given.
    """
    passes = []
    is_local = True
    forward: Event = {}
    for event in events:
        if event["kind"] in ("forward", "step"):
            is_local = True
            forward = event
        if event["kind"] == "collective" and event["by_script"]:
            is_local = False
        if event["kind"] == "backward" and is_local:
            says_enough = event["bits"] >= 32 and not forward.get("drawn")
            given = event["loss"] if says_enough else forward.get("inputs")
            passes += [{**event, "given": given}] if given else []
    return passes


def same_workers(run: Run, all_epochs: list[Epoch]) -> Iterator[Finding]:
    """Of a stream, which each worker reads as a whole."""
    for peers, batches, *_ in all_epochs:
        workers = peers[0]["workers"]
        if workers < 2 or peers[0]["samples"] is not None:
            continue
        contents = [str(batch["columns"]) for batch in batches[0]]
        whole_rounds = contents[: len(contents) // workers * workers]
        kinds = len(set(whole_rounds))
        if kinds >= BATCHES and kinds * workers == len(whole_rounds):
            kind = "each worker reads everything"
            yield run.found(kind, peers[0], workers=workers)


def same_order(run: Run, training: list[Epoch]) -> Iterator[Finding]:
    """One place reads one sampler again and again, and gets what it got."""
    by_place: dict[tuple[int, str], list[Event]] = {}
    for epoch in training:
        event = epoch.peers[0]
        place = (event["sampler_id"], event["path"])
        by_place.setdefault(place, []).append(event)
    for events in by_place.values():
        are_numbered = len({event["epoch"] for event in events}) > 1
        for before, event in pairwise(events):
            order = event["first"]
            is_shuffled = len(order) >= SHARED and order != sorted(order)
            is_same = is_shuffled and before["first"][: len(order)] == order
            if is_same and should_shuffle(event) and not are_numbered:
                text = listed(order[:4])
                yield run.found("same order in each epoch", event, order=text)


def should_shuffle(epoch: Event) -> bool:
    if epoch["has_set_epoch"]:
        return epoch["shuffle"] is not False
    return bool(epoch["sampler"] == "RandomSampler")
