"""What is noted of `DataLoader`: which samples each rank reads, and how."""

import functools
import linecache
import random
import re
import sys
import weakref
import zlib
from collections import Counter, deque
from itertools import takewhile
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data._utils.worker import _worker_loop
from torch.utils.data.dataloader import _BaseDataLoaderIter

from miniddp.check.finding import Event
from miniddp.check.order_of_data import order_of
from miniddp.check.probe import Call, Notes, stand_around
from miniddp.check.recorder import (
    Recorder,
    line_of,
    user_frames,
    user_line,
    user_path,
)
from miniddp.check.samples import are_named, columns_of, largest_of
from miniddp.check.training_facts import random_state

REMEMBERED = 64
"""So many samples at the start of an epoch are compared with the next."""
MOST_EPOCHS = 30
"""So often a line's loader is noted after the watch."""
FETCHES = 3
"""So many of each worker are compared, but for the first."""
GENERATORS = 3
WAYS_OUT = {"break", "exit", "raise", "return", "yield"}
ASKED = ("num_replicas", "rank", "shuffle", "seed", "replacement", "epoch")
"""Of a sampler, if it has them."""


def install(recorder: Recorder) -> None:
    probes = DataProbes(recorder)
    stand_around(recorder, DataLoader, "__iter__", probes.iterate)
    iterator = _BaseDataLoaderIter
    stand_around(recorder, iterator, "_next_index", probes.next_index)
    stand_around(recorder, iterator, "__next__", probes.next_batch)
    stand_around(recorder, _MapDatasetFetcher, "fetch", probes.fetch)
    stand_around(recorder, BaseProcess, "__init__", probes.start_worker)


class DataProbes:
    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.begun: Counter[str] = Counter()
        """How often the loader of a line has been read."""
        self.trained: Counter[str] = Counter()
        """How often it has been read to its end, with steps on the way."""
        self.asked: weakref.WeakKeyDictionary[Any, deque[Any]]
        self.asked = weakref.WeakKeyDictionary()
        """Of each iterator the indices that it asked for, and not yet gave."""
        self.epochs: weakref.WeakKeyDictionary[Any, Event]
        self.epochs = weakref.WeakKeyDictionary()
        self.draws: weakref.WeakKeyDictionary[Any, torch.Tensor]
        self.draws = weakref.WeakKeyDictionary()
        """Of each iterator what its workers draw from, as they write it."""
        self.newest_draws = torch.empty(0)

    def iterate(self, call: Call) -> Notes:
        loader = call.args[0]
        before = getattr(loader, "_iterator", None)
        if before is not None:  # its workers stay, and so does the iterator
            self.asked.pop(before, None)
        elif loader.num_workers:
            size = (loader.num_workers, FETCHES, GENERATORS)
            self.newest_draws = torch.zeros(size, dtype=torch.int64)
            self.newest_draws.share_memory_()
        yield
        self.draws.setdefault(call.result, self.newest_draws)
        frame = next(user_frames(sys._getframe(1)), None)
        line = line_of(frame) if frame else ""
        if self.trained[line] == self.recorder.epochs:
            self.recorder.is_watching = False
        if not self.recorder.is_watching and self.begun[line] >= MOST_EPOCHS:
            return
        self.epochs[call.result] = self.recorder.note(
            "epoch",
            line=line,
            path=user_path(),
            place=f"{line} {self.begun[line]}",
            is_read_to_its_end=is_read_to_its_end(frame),
            workers=loader.num_workers,
            batch_size=loader.batch_size,
            first=[],
            read=0,
            order={} if self.begun[line] else order_of(loader.dataset),
            **facts_of(loader),
        )
        self.begun[line] += 1

    def next_index(self, call: Call) -> Notes:
        yield
        self.asked.setdefault(call.args[0], deque()).append(call.result)

    def next_batch(self, call: Call) -> Notes:
        epoch = self.epochs.get(call.args[0])
        if epoch is None:
            yield
            return
        try:
            with self.recorder.inside("the data loader", group=None):
                yield
        finally:
            if isinstance(call.error, StopIteration):
                self.end_epoch(epoch)
        asked = self.asked.get(call.args[0])
        indices = integers(asked.popleft() if asked else None)
        if epoch["workers"]:
            self.note_draws(epoch, self.draws[call.args[0]])
        epoch["read"] += 1
        if len(epoch["first"]) < REMEMBERED:
            epoch["first"] += indices
        if self.recorder.is_watching:
            self.recorder.note(
                "batch",
                line=epoch["line"],
                place=epoch["place"],
                indices=indices,
                columns=columns_of(call.result),
                are_named=are_named(call.result),
                random=random_state(),
                largest=largest_of(call.result),
            )

    def note_draws(self, epoch: Event, draws: torch.Tensor) -> None:
        """Of the worker that has made the next batch, but for its first."""
        fetch, worker = divmod(epoch["read"], epoch["workers"])
        if 0 < fetch < FETCHES and self.recorder.is_watching:
            drawn = [state for state in draws[worker, fetch].tolist() if state]
            self.recorder.note("fetch", line=epoch["line"], drawn=drawn)

    def fetch(self, call: Call) -> Notes:
        """Samples are made, in this process if there are no workers."""
        if not self.recorder.is_watching or get_worker_info() is not None:
            yield
            return
        before = random_states()
        yield
        self.recorder.note("fetch", line=user_line(), drawn=moved(before))

    def start_worker(self, call: Call) -> Notes:
        if call.keywords.get("target") is _worker_loop:
            watched = functools.partial(work, self.newest_draws)
            call.keywords["target"] = watched
        yield

    def end_epoch(self, epoch: Event) -> None:
        line = epoch["line"]
        self.trained[line] += self.recorder.step > epoch["step"]
        self.recorder.note("end of epoch", place=epoch["place"])


def work(draws: torch.Tensor, *arguments: Any) -> None:
    """A worker's loop, which writes into `draws` what it draws from."""
    numbers = iter(range(FETCHES))

    def fetch(call: Call) -> Notes:
        number = next(numbers, None)
        if number is None:
            yield
            return
        before = random_states()
        yield
        drawn = torch.tensor(moved(before), dtype=torch.int64)
        worker: Any = get_worker_info()
        draws[worker.id, number, : len(drawn)] = drawn

    recorder = Recorder(steps=None, epochs=None)
    stand_around(recorder, _MapDatasetFetcher, "fetch", fetch)
    _worker_loop(*arguments)


def integers(indices: Any) -> list[int]:
    are_integers = isinstance(indices, list) and all(
        type(index) is int for index in indices
    )
    return indices if are_integers else []


def facts_of(loader: Any) -> Event:
    sampler = sampler_of(loader)
    facts: Event = {}
    for name in ASKED:
        value = getattr(sampler, name, None)
        facts[name] = value if isinstance(value, int | bool) else None
    facts["sampler_id"] = id(sampler)
    facts["sampler"] = type(sampler).__name__
    facts["has_set_epoch"] = hasattr(sampler, "set_epoch")
    is_stream = isinstance(loader.dataset, IterableDataset)
    facts["batches"] = None if is_stream else length_of(loader)
    facts["samples"] = None if is_stream else length_of(loader.dataset)
    return facts


def sampler_of(loader: Any) -> Any:
    """What chooses samples, within what makes batches of them."""
    sampler = loader.batch_sampler
    if sampler is None:
        sampler = loader.sampler
    for name in ("batch_sampler", "sampler"):
        sampler = getattr(sampler, name, sampler)
    return sampler


def moved(before: list[int]) -> list[int]:
    """Those of the states of generators that are so no more."""
    after = random_states()
    return [state for state in before if state not in after]


def random_states() -> list[int]:
    """Digests of this process's generators: torch's, Python's and numpy's."""
    states = [random_state(), zlib.crc32(repr(random.getstate()).encode())]
    if "numpy" in sys.modules:
        _, keys, position, *_ = sys.modules["numpy"].random.get_state()
        states.append(zlib.crc32(keys.tobytes() + str(position).encode()))
    return states


def length_of(collection: Any) -> int | None:
    try:
        return len(collection)
    except (TypeError, NotImplementedError):
        return None


def is_read_to_its_end(frame: FrameType | None) -> bool:
    """Whether a `for` goes through all of it, as far as its text tells."""
    if frame is None:
        return False
    lines = linecache.getlines(frame.f_code.co_filename)
    first, *rest = lines[frame.f_lineno - 1 :] or [""]
    margin = indentation(first)
    body = takewhile(lambda s: not s.strip() or indentation(s) > margin, rest)
    words = set(re.findall(r"\w+", "".join(body)))
    is_cut = "islice" in first or "zip" in first
    is_loop = first.strip().startswith("for ")
    return is_loop and not is_cut and not words & WAYS_OUT


def indentation(line: str) -> int:
    return len(line) - len(line.lstrip())
