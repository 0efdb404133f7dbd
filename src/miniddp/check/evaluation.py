"""Evaluation: is each sample counted once?"""

from collections.abc import Iterator

from miniddp.check.epochs import epochs, samples_of
from miniddp.check.finding import Event, Finding, Run


def find(run: Run) -> Iterator[Finding]:
    """Samples that several ranks evaluate, and whose results are added."""
    if not run.is_data_parallel():
        return
    all_epochs = epochs(run)
    training = {e.peers[0]["place"] for e in all_epochs if e.is_training}
    for epoch in all_epochs:
        first = epoch.peers[0]
        sums = added_up(run, first, training)
        if epoch.is_training or not sums:
            continue
        read = [s for of_rank in epoch.batches for s in samples_of(of_rank)]
        count = len(set(read))
        twice = len(read) - count
        by_all = len(read) == len(run.ranks) * count
        if by_all and not are_counts(sums, count):
            continue  # means, or sums beside the number of their terms
        if twice > 0 and count == first["samples"]:
            kind = "evaluated twice"
            yield run.found(kind, first, samples=count, twice=twice)


def added_up(run: Run, epoch: Event, training: set[str]) -> list[list[float]]:
    """What is all-reduced after this epoch, before the next training."""
    sums = []
    has_ended = False
    for event in run.events[0]:
        if event["kind"] == "end of epoch":
            has_ended = has_ended or event["place"] == epoch["place"]
        is_training = event.get("place") in training
        if has_ended and (is_training or event["kind"] == "backward"):
            break
        if has_ended and event.get("operation") == "all_reduce":
            sums.append(event.get("summed", []))
    return sums


def are_counts(sums: list[list[float]], samples: int) -> bool:
    """Integers, none of which is the number of all samples."""
    values = [value for row in sums for value in row]
    are_integers = all(isinstance(value, int) for value in values)
    return bool(values) and are_integers and samples not in values
