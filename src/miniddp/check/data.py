"""Data: does each rank read its own part, all of it, each epoch anew?"""

from collections.abc import Iterator
from typing import NamedTuple

from miniddp.check.finding import Event, Finding, Peers, Run, are_same

BATCHES = 2
"""So many batches have to be equal, and different from each other."""
STEPS = 3
"""So many losses or gradients."""
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


def find(run: Run) -> Iterator[Finding]:
    all_epochs = epochs(run)
    training = [epoch for epoch in all_epochs if epoch.is_training]
    yield from unequal(run, training)
    yield from same_workers(run, all_epochs)
    yield from same_order(run, training)
    if run.is_data_parallel():
        faults = [
            *sampler(run, all_epochs),
            *same_samples(run, training),
            *overlap(run, training),
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
    for peers, _, have_ended, _ in training:
        counts = [event["batches"] for event in peers]
        is_bound_to = all(event["is_read_to_its_end"] for event in peers)
        if run.stuck:
            counts = [event["read"] for event in peers]
            is_bound_to = any(have_ended) and not all(have_ended)
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
        if fault:
            yield run.found("samplers that do not split", first, fault=fault)


def same_samples(run: Run, training: list[Epoch]) -> Iterator[Finding]:
    """In the batches, in the losses of one line, or in what is sent."""
    candidates = []
    for epoch in training:
        rows = list(zip(*epoch.batches, strict=False))
        if are_same([r for r in rows if r[0]["columns"]], "columns", BATCHES):
            candidates.append(rows)
    losses = [local_losses(run.events[rank]) for rank in run.ranks]
    by_line: dict[str, list[Peers]] = {}
    for peers in zip(*losses, strict=False):
        by_line.setdefault(peers[0]["line"], []).append(peers)
    candidates += [r for r in by_line.values() if are_same(r, "loss", STEPS)]
    if not run.all_of_kind("wrap"):
        calls = run.side_by_side("collective")
        sent = [peers for peers in calls if all("before" in e for e in peers)]
        candidates += [sent] if are_same(sent, "before", STEPS) else []
    for rows in candidates:
        yield run.found("same samples", rows[0][0])


def local_losses(events: list[Event]) -> list[Event]:
    """The backward passes of a wrapper whose forward has talked to nobody."""
    passes = []
    is_local = False
    for event in events:
        if event["kind"] == "forward":
            is_local = True
        if event["kind"] == "collective" and event["by_script"]:
            is_local = False
        if event["kind"] == "backward":
            if is_local and event["loss"]:
                passes.append(event)
            is_local = False
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
        if is_equal and len(both) >= SHARED and len(set(column)) >= BATCHES:
            return len(both)
    return 0


def share_content(
    mine: dict[int, list[int]], others: dict[int, list[int]]
) -> int:
    """How many both have read, if they are many, wherever they lie."""
    kinds = set(map(tuple, mine.values()))
    both = kinds & set(map(tuple, others.values()))
    are_many = len(both) >= max(SHARED + 1, len(kinds) / 5)
    return len(both) if are_many and () not in both else 0


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
    last: dict[int, list[int]] = {}
    for peers, *_ in training:
        epoch = peers[0]
        before = last.get(epoch["sampler_id"], [])
        order = epoch["first"]
        last[epoch["sampler_id"]] = order
        is_shuffled = len(order) >= SHARED and order != sorted(order)
        is_same = is_shuffled and before[: len(order)] == order
        if is_same and should_shuffle(epoch):
            text = listed(order[:4])
            yield run.found("same order in each epoch", epoch, order=text)


def should_shuffle(epoch: Event) -> bool:
    if epoch["has_set_epoch"]:
        return epoch["shuffle"] is not False
    return bool(epoch["sampler"] == "RandomSampler")


def evaluated_twice(run: Run, all_epochs: list[Epoch]) -> Iterator[Finding]:
    """Samples that several ranks evaluate, and whose results are added."""
    for epoch in all_epochs:
        first = epoch.peers[0]
        if epoch.is_training or not is_added_up(run, first):
            continue
        read = [
            (index, *columns)
            for of_rank in epoch.batches
            for batch in of_rank
            for index, columns in samples_of([batch]).items()
        ]
        count = len(set(read))
        if count < len(read) and count == first["samples"]:
            twice = len(read) - count
            kind = "evaluated twice"
            yield run.found(kind, first, samples=count, twice=twice)


def is_added_up(run: Run, epoch: Event) -> bool:
    """Whether an all-reduce follows this epoch before the next training."""
    has_ended = False
    for event in run.events[0]:
        if event["kind"] == "end of epoch":
            has_ended = has_ended or event["place"] == epoch["place"]
        if has_ended and event["kind"] == "backward":
            return False
        if has_ended and event.get("operation") == "all_reduce":
            return True
    return False
