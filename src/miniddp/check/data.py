"""Data: does each rank read its own part, all of it, each epoch anew?"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from miniddp.check.finding import Event, Finding, Peers, Run, are_same

BATCHES = 2
"""So many batches have to be equal, and different from each other."""
STEPS = 3
"""So many losses or gradients."""
UNIQUE = 0.9
"""Such a share of the samples has to be unlike the others, to be known."""
SHARED = 3
"""So many samples that both read have to be equal."""


class Epoch(NamedTuple):
    """The n-th time that a line goes through a DataLoader, on all ranks."""

    peers: Peers
    batches: list[list[Event]]
    """Of each rank."""
    have_ended: list[bool]
    is_training: bool
    """Whether an optimizer has stepped on the way."""

    def rows(self) -> list[Peers]:
        return list(zip(*self.batches, strict=False))

    def has_same_batches(self) -> bool:
        rows = [row for row in self.rows() if row[0]["columns"]]
        return are_same(rows, "columns", BATCHES)


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
        yield from evaluated_twice(run, all_epochs)


def epochs(run: Run) -> list[Epoch]:
    by_place = [
        {e["place"]: e for e in run.of_kind(rank, "epoch")}
        for rank in run.ranks
    ]
    batches = [events_by_place(run, rank, "batch") for rank in run.ranks]
    ends = [events_by_place(run, rank, "end of epoch") for rank in run.ranks]
    found = []
    for place, first in by_place[0].items():
        if not all(place in of_rank for of_rank in by_place):
            continue
        later = batches[0].get(place, []) + ends[0].get(place, [])
        found.append(
            Epoch(
                tuple(of_rank[place] for of_rank in by_place),
                [of_rank.get(place, []) for of_rank in batches],
                [place in of_rank for of_rank in ends],
                any(event["step"] > first["step"] for event in later),
            )
        )
    return found


def events_by_place(run: Run, rank: int, kind: str) -> dict[str, list[Event]]:
    by_place: dict[str, list[Event]] = {}
    for event in run.of_kind(rank, kind):
        by_place.setdefault(event["place"], []).append(event)
    return by_place


def unequal(run: Run, training: list[Epoch]) -> Iterator[Finding]:
    """One rank has fewer batches: by their number, or because it is out."""
    for epoch in training:
        peers, _, have_ended, _ = epoch
        counts = [event["batches"] for event in peers]
        is_bound_to = all(event["is_read_to_its_end"] for event in peers)
        if run.stuck and not all(have_ended):
            is_bound_to = any(have_ended)
        if run.stuck or all(have_ended):
            counts = [event["read"] for event in peers]
        if not run.stuck and not meets_others(run.events[0], peers[0]):
            continue
        if None in counts or run.is_joined() or not is_bound_to:
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
        numbers = [event["sampler_epoch"] for event in peers]
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
    """In the batches, in the losses of one line, or in what is sent."""
    candidates = [
        epoch.rows() for epoch in training if epoch.has_same_batches()
    ]
    passes = [local_passes(run.events[rank]) for rank in run.ranks]
    by_line: dict[str, list[Peers]] = {}
    for peers in zip(*passes, strict=False):
        by_line.setdefault(peers[0]["line"], []).append(peers)
    candidates += [r for r in by_line.values() if are_same(r, "given", STEPS)]
    if not run.all_of_kind("wrap"):
        calls = run.side_by_side("collective")
        sent = [peers for peers in calls if all("before" in e for e in peers)]
        candidates += [sent] if are_same(sent, "before", STEPS) else []
    for rows in candidates:
        yield run.found("same samples", rows[0][0])


def is_sliced(run: Run, epoch: Epoch) -> bool:
    """Whether all read the same batches, and each takes its own slice."""
    if not epoch.has_same_batches():
        return False
    first = epoch.batches[0][0]
    events = run.events[0]
    for event in events[events.index(first) :]:
        if event["kind"] == "forward":
            return bool(event["largest"] * len(run.ranks) <= first["largest"])
        if event["kind"] == "step":
            break
    return not are_same(list(run.side_by_side("backward")), "loss", BATCHES)


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
            says_enough = event["bits"] >= 32 and not forward.get("draws")
            given = event["loss"] if says_enough else forward.get("inputs")
            passes += [{**event, "given": given}] if given else []
    return passes


def overlap(run: Run, training: list[Epoch]) -> Iterator[Finding]:
    """Samples that ranks 0 and 1 read, each in an order of its own."""
    for epoch in training:
        mine, others, *_ = map(samples_of, epoch.batches)
        count = max(share_samples(mine, others), share_content(mine, others))
        if count and all(reads_everything(event) for event in epoch.peers):
            yield run.found(
                "overlapping shares",
                epoch.peers[0],
                count=count,
                watched=len(mine),
            )


def reads_everything(epoch: Event) -> bool:
    if epoch["replacement"] or None in (epoch["samples"], epoch["batches"]):
        return False
    size = epoch["batch_size"] or 1
    return bool((epoch["batches"] + 1) * size > epoch["samples"])


def samples_of(batches: list[Event]) -> dict[int, list[int]]:
    """Of each sample that was read, by its index, its digests."""
    samples = {}
    for batch in batches:
        indices = batch["indices"]
        columns = [c for c in batch["columns"] if len(c) == len(indices)]
        for number, index in enumerate(indices):
            samples[index] = [column[number] for column in columns]
    return samples


def share_samples(
    mine: dict[int, list[int]], others: dict[int, list[int]]
) -> int:
    """How many both have read, if a column is equal, and no constant."""
    both = mine.keys() & others.keys()
    pairs = [zip(mine[index], others[index], strict=False) for index in both]
    for column in zip(*pairs, strict=False):
        is_equal = all(one == other for one, other in column)
        are_enough = len(both) >= SHARED and len(set(column)) >= BATCHES
        if is_equal and are_enough and not is_regular(list(both), column):
            return len(both)
    return 0


def is_regular(indices: list[int], values: Peers) -> bool:
    """Whether the values follow from the indices, as labels may."""
    for period in range(1, len(indices) // 2 + 1):
        rests = [index % period for index in indices]
        if len(set(zip(rests, values, strict=True))) == len(set(rests)):
            return True
    in_order = [value for _, value in sorted(zip(indices, values, strict=True))]
    changes = sum(one != other for one, other in pairwise(in_order))
    return changes < len(set(in_order))


def share_content(
    mine: dict[int, list[int]], others: dict[int, list[int]]
) -> int:
    """How many both have read, if they are many, wherever they lie."""
    kinds = set(map(tuple, mine.values()))
    both = kinds & set(map(tuple, others.values()))
    are_many = len(both) >= max(SHARED + 1, len(kinds) / 5)
    are_unique = len(kinds) > UNIQUE * len(mine)
    return len(both) if are_many and are_unique and () not in both else 0


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
        are_numbered = len({event["sampler_epoch"] for event in events}) > 1
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


def evaluated_twice(run: Run, all_epochs: list[Epoch]) -> Iterator[Finding]:
    """Samples that several ranks evaluate, and whose results are added."""
    for epoch in all_epochs:
        first = epoch.peers[0]
        sums = added_up(run, first)
        if epoch.is_training or not sums:
            continue
        read = [
            (index, *columns)
            for of_rank in epoch.batches
            for batch in of_rank
            for index, columns in samples_of([batch]).items()
        ]
        count = len(set(read))
        twice = len(read) - count
        by_all = len(read) == len(run.ranks) * count
        if by_all and not are_counts(sums, count):
            continue  # means, or sums beside the number of their terms
        if twice > 0 and count == first["samples"]:
            kind = "evaluated twice"
            yield run.found(kind, first, samples=count, twice=twice)


def added_up(run: Run, epoch: Event) -> list[list[float]]:
    """What is all-reduced after this epoch, before the next training."""
    sums = []
    has_ended = False
    for event in run.events[0]:
        if event["kind"] == "end of epoch":
            has_ended = has_ended or event["place"] == epoch["place"]
        if has_ended and event["kind"] == "backward":
            break
        if has_ended and event.get("operation") == "all_reduce":
            sums.append(event.get("summed", []))
    return sums


def are_counts(sums: list[list[float]], samples: int) -> bool:
    """Integers, none of which is the number of all samples."""
    values = [value for row in sums for value in row]
    are_integers = all(isinstance(value, int) for value in values)
    return bool(values) and are_integers and samples not in values
