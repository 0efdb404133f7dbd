"""Data: does each rank read its own part, all of it, each epoch anew?"""

from collections.abc import Iterator

from miniddp.check.finding import Event, Finding, Run, equal, found

BATCHES = 2
"""So many batches have to be equal, and different from each other."""
SHARED = 3
"""So many samples that both read have to be equal."""
Place = tuple[str, int]
"""Of an epoch: the line that reads it, and how often it has done so."""


def find(run: Run) -> Iterator[Finding]:
    yield from unequal(run)
    yield from same_workers(run)
    yield from same_order(run)
    if run.is_data_parallel():
        parts = [*samplers(run), *same_batches(run), *same_inputs(run)]
        parts += same_samples(run)
        yield from parts[:1]
        yield from evaluated_twice(run)


def place(event: Event) -> Place:
    return event["line"], event["epoch"]


def epochs(run: Run) -> Iterator[tuple[Event, ...]]:
    """Those of the same place, of all ranks."""
    of_ranks = [
        {place(e): e for e in run.of_kind(r, "epoch")} for r in run.ranks
    ]
    for key in of_ranks[0]:
        if all(key in of_rank for of_rank in of_ranks):
            yield tuple(of_rank[key] for of_rank in of_ranks)


def batches_of(run: Run, rank: int, epoch: Event) -> list[Event]:
    return [e for e in run.of_kind(rank, "batch") if place(e) == place(epoch)]


def trained(run: Run, rank: int) -> set[Place]:
    """The epochs of which a batch was followed by a backward pass."""
    since: dict[int, Place] = {}
    places: set[Place] = set()
    for event in run.events[rank]:
        if event["kind"] == "batch":
            since[event["sampler_id"]] = place(event)
        if event["kind"] == "backward":
            places |= set(since.values())
            since = {}
    return places


def training_epochs(run: Run) -> Iterator[tuple[Event, ...]]:
    places = set.intersection(*(trained(run, rank) for rank in run.ranks))
    return (peers for peers in epochs(run) if place(peers[0]) in places)


def unequal(run: Run) -> Iterator[Finding]:
    """One rank has fewer batches: by their number, or because it is out."""
    for peers in training_epochs(run):
        counts = [event["batches"] for event in peers]
        is_bound_to = all(event["is_read_to_its_end"] for event in peers)
        if run.stuck:
            counts = [event["read"] for event in peers]
            ended = [
                place(peers[0]) in map(place, run.of_kind(rank, "end of epoch"))
                for rank in run.ranks
            ]
            is_bound_to = any(ended) and not all(ended)
        if None in counts or len(set(counts)) == 1 or not is_bound_to:
            continue
        if run.is_joined():
            continue
        fewest = min(counts)
        rank = counts.index(fewest)
        yield found(
            "unequal batches",
            peers[0],
            [rank],
            "certain" if run.stuck else "likely",
            counts=", ".join(map(str, counts)),
            fewest=fewest,
            rank=rank,
        )
        return


def samplers(run: Run) -> Iterator[Finding]:
    """What the samplers that split the data have been told."""
    size = len(run.ranks)
    for peers in epochs(run):
        first = peers[0]
        if None in [event["num_replicas"] for event in peers]:
            continue
        told = {"size": first["num_replicas"], "world_size": size}
        kind = None
        if any(event["num_replicas"] != size for event in peers):
            kind = "sampler for other ranks"
        elif len({event["rank"] for event in peers}) < size:
            kind = "same share"
        elif first["shuffle"] and not equal(peers, "seed"):
            kind = "samplers of other seeds"
        elif first["shuffle"] and not equal(peers, "sampler_epoch"):
            kind = "samplers of other epochs"
        if kind is not None:
            yield found(kind, first, run.ranks, rank=first["rank"], **told)


def same_batches(run: Run) -> Iterator[Finding]:
    for epoch in training_epochs(run):
        batches = [batches_of(run, rank, epoch[0]) for rank in run.ranks]
        rows = [row for row in zip(*batches, strict=False) if row[0]["columns"]]
        if are_same(rows, "columns", BATCHES):
            yield found("same samples", rows[0][0], run.ranks)


def same_inputs(run: Run) -> Iterator[Finding]:
    """Of programs without DataLoader: what goes into the model."""
    rows = [
        peers
        for peers in run.side_by_side("forward")
        if peers[0]["is_training"] and peers[0]["inputs"]
    ]
    if are_same(rows, "inputs", BATCHES + 1):
        yield found("same samples", rows[0][0], run.ranks)


def are_same(rows: list[tuple[Event, ...]], key: str, kinds: int) -> bool:
    """In all rows, of which so many differ from each other."""
    values = {str(row[0][key]) for row in rows}
    return len(values) >= kinds and all(equal(row, key) for row in rows)


def same_samples(run: Run) -> Iterator[Finding]:
    """Every rank reads all of the data, each in an order of its own."""
    for peers in training_epochs(run):
        if not all(reads_everything(event) for event in peers):
            continue
        mine = dict(samples_of(batches_of(run, 0, peers[0])))
        others = dict(samples_of(batches_of(run, 1, peers[0])))
        overlap = overlap_of(list(mine.values()), list(others.values()))
        if overlap and not share_samples(mine, others):
            kind = "overlapping shares"
            yield found(kind, peers[0], run.ranks, count=overlap)
        if share_samples(mine, others):
            count = peers[0]["samples"]
            kind = "all samples on every rank"
            yield found(kind, peers[0], run.ranks, samples=count)


def reads_everything(epoch: Event) -> bool:
    if epoch["replacement"] or None in (epoch["samples"], epoch["batches"]):
        return False
    size = epoch["batch_size"] or 1
    return bool((epoch["batches"] + 1) * size > epoch["samples"])


def samples_of(batches: list[Event]) -> list[tuple[int, list[int]]]:
    """Of each sample that was read its index and its digests."""
    samples = []
    for batch in batches:
        indices = batch["indices"] or []
        columns = [c for c in batch["columns"] if len(c) == len(indices)]
        for number, index in enumerate(indices):
            samples.append((index, [column[number] for column in columns]))
    return samples


def share_samples(
    mine: dict[int, list[int]], others: dict[int, list[int]]
) -> bool:
    """Whether a column of what both have read is equal, and no constant."""
    both = [index for index in mine if index in others]
    if len(both) < SHARED:
        return False
    for column in range(len(mine[both[0]])):
        pairs = {(mine[index][column], others[index][column]) for index in both}
        if len(pairs) >= BATCHES and all(one == other for one, other in pairs):
            return True
    return False


def overlap_of(mine: list[list[int]], others: list[list[int]]) -> int:
    """How many samples both have read, if they are many, wherever they lie."""
    kinds = {tuple(columns) for columns in mine}
    both = kinds & {tuple(columns) for columns in others}
    are_many = len(both) >= max(SHARED + 1, len(kinds) / 5)
    return len(both) if are_many and () not in both else 0


def same_workers(run: Run) -> Iterator[Finding]:
    """Of a stream, which each worker reads as a whole."""
    for epoch in run.of_kind(0, "epoch"):
        workers = epoch["workers"]
        if workers < 2 or epoch["samples"] is not None:
            continue
        batches = batches_of(run, 0, epoch)
        contents = [str(batch["columns"]) for batch in batches]
        whole_rounds = contents[: len(contents) // workers * workers]
        kinds = len(set(whole_rounds))
        if kinds >= BATCHES and kinds * workers == len(whole_rounds):
            kind = "each worker reads everything"
            yield found(kind, epoch, run.ranks, workers=workers)
            return


def same_order(run: Run) -> Iterator[Finding]:
    last: dict[int, Event] = {}
    training = trained(run, 0)
    for epoch in run.of_kind(0, "epoch"):
        if place(epoch) not in training or not should_shuffle(epoch):
            continue
        before = last.get(epoch["sampler_id"])
        last[epoch["sampler_id"]] = epoch
        order = epoch["first"]
        if before is None or len(order) < SHARED or order == sorted(order):
            continue
        if before["first"][: len(order)] == order:
            shown = ", ".join(map(str, order[:4]))
            kind = "same order in each epoch"
            yield found(kind, epoch, run.ranks, order=shown)
            return


def should_shuffle(epoch: Event) -> bool:
    if epoch["has_set_epoch"]:
        return epoch["shuffle"] is not False
    return bool(epoch["sampler"] == "RandomSampler")


def evaluated_twice(run: Run) -> Iterator[Finding]:
    """Samples that several ranks evaluate, and whose results are added."""
    for peers in epochs(run):
        epoch = peers[0]
        if place(epoch) in trained(run, 0) or not is_added_up(run, epoch):
            continue
        read = [
            (index, *columns)
            for rank in run.ranks
            for index, columns in samples_of(batches_of(run, rank, epoch))
        ]
        twice = len(read) - len(set(read))
        if twice and len(set(read)) == epoch["samples"]:
            yield found(
                "evaluated twice",
                epoch,
                run.ranks,
                "likely",
                samples=epoch["samples"],
                twice=twice,
            )
            return


def is_added_up(run: Run, epoch: Event) -> bool:
    """Whether an all-reduce follows this epoch before the next training."""
    has_ended = False
    for event in run.events[0]:
        if event["kind"] == "end of epoch":
            has_ended = has_ended or place(event) == place(epoch)
        if has_ended and event["kind"] == "backward":
            return False
        if has_ended and event.get("operation") == "all_reduce":
            return True
    return False
