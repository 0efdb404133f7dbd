"""What is noted of `DataLoader`: which samples each rank reads, and how."""

import ast
import linecache
import sys
import weakref
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from miniddp.check.around import stand_around
from miniddp.check.finding import Event
from miniddp.check.recorder import Recorder, Rows, line_of, user_frames

COLUMNS = 3
"""Of so many tensors of a batch the samples are compared."""
REMEMBERED = 64
"""So many samples at the start of an epoch are compared with the next."""
ASKED = ("num_replicas", "rank", "shuffle", "seed", "replacement")


class DataProbes:
    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.epochs: dict[str, int] = {}
        """How often the loader of a line has been read."""
        self.asked: weakref.WeakKeyDictionary[Any, deque[Any]]
        self.asked = weakref.WeakKeyDictionary()
        """Of each iterator the indices that it asked for, and not yet gave."""
        self.epoch_of: weakref.WeakKeyDictionary[Any, Event]
        self.epoch_of = weakref.WeakKeyDictionary()

    def install(self) -> None:
        stand_around(DataLoader, "__iter__", self.iterate)
        stand_around(_BaseDataLoaderIter, "_next_index", self.next_index)
        stand_around(_BaseDataLoaderIter, "__next__", self.next_batch)

    def iterate(self, original: Callable[..., Any], loader: Any) -> Any:
        before = getattr(loader, "_iterator", None)
        if before is not None:
            self.asked.pop(before, None)
        iterator = original(loader)
        frame = next(user_frames(sys._getframe(1)), None)
        line = line_of(frame) if frame else ""
        self.epochs[line] = self.epochs.get(line, -1) + 1
        self.epoch_of[iterator] = self.recorder.note(
            "epoch",
            line=line,
            epoch=self.epochs[line],
            is_read_to_its_end=is_read_to_its_end(frame),
            base_seed=iterator._base_seed,
            workers=loader.num_workers,
            batch_size=loader.batch_size,
            first=[],
            read=0,
            **facts_of(loader),
        )
        return iterator

    def next_index(self, original: Callable[..., Any], iterator: Any) -> Any:
        index = original(iterator)
        self.asked.setdefault(iterator, deque()).append(index)
        return index

    def next_batch(self, original: Callable[..., Any], iterator: Any) -> Any:
        epoch = self.epoch_of.get(iterator)
        if epoch is None:
            return original(iterator)
        try:
            with self.recorder.inside(
                "the data loader", group=None, shape=None
            ):
                batch = original(iterator)
        except StopIteration:
            self.recorder.note(
                "end of epoch",
                line=epoch["line"],
                read=epoch["read"],
                epoch=epoch["epoch"],
            )
            raise
        asked = self.asked.get(iterator)
        indices = asked.popleft() if asked else None
        epoch["read"] += 1
        if isinstance(indices, list) and len(epoch["first"]) < REMEMBERED:
            epoch["first"] += [i for i in indices if isinstance(i, int)]
        if self.recorder.is_watching:
            self.note_batch(epoch, indices, batch)
        return batch

    def note_batch(self, epoch: Event, indices: Any, batch: Any) -> None:
        if not isinstance(indices, list) or not all(
            type(i) is int for i in indices
        ):
            indices = None
        leaves = [
            leaf
            for leaf in pytree.tree_leaves(batch)
            if isinstance(leaf, Tensor)
        ]
        columns = [
            leaf
            for leaf in leaves
            if leaf.dim() and leaf.layout == torch.strided
        ]
        self.recorder.note(
            "batch",
            line=epoch["line"],
            epoch=epoch["epoch"],
            sampler_id=epoch["sampler_id"],
            indices=indices,
            columns=[Rows(leaf) for leaf in columns[:COLUMNS]],
        )


def facts_of(loader: Any) -> Event:
    sampler = sampler_of(loader)
    facts = {name: getattr(sampler, name, None) for name in ASKED}
    facts = {
        name: value if isinstance(value, int | bool) else None
        for name, value in facts.items()
    }
    facts["sampler_epoch"] = getattr(sampler, "epoch", None)
    facts["sampler_id"] = id(sampler)
    facts["sampler"] = type(sampler).__name__
    facts["has_set_epoch"] = hasattr(sampler, "set_epoch")
    facts["batches"] = None
    facts["samples"] = None
    if not isinstance(loader.dataset, IterableDataset):
        facts["batches"] = length_of(loader)
        facts["samples"] = length_of(loader.dataset)
    return facts


def sampler_of(loader: Any) -> Any:
    """What chooses samples, within what makes batches of them."""
    sampler = loader.batch_sampler
    if sampler is None:
        sampler = loader.sampler
    for name in ("batch_sampler", "sampler"):
        sampler = getattr(sampler, name, sampler)
    return sampler


def length_of(collection: Any) -> int | None:
    try:
        return len(collection)
    except (TypeError, NotImplementedError):
        return None


def is_read_to_its_end(frame: FrameType | None) -> bool:
    """Whether the script goes through it by a `for` that nothing ends early."""
    if frame is None:
        return False
    lines = linecache.getlines(frame.f_code.co_filename)
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:
        return False
    for node in ast.walk(tree):
        if isinstance(node, ast.For) and node.iter.lineno == frame.f_lineno:
            return is_all_of(node.iter) and not ends_early(node)
    return False


def is_all_of(iterated: ast.expr) -> bool:
    """`loader`, `self.loader`, `enumerate(loader)`, `tqdm(loader)`."""
    if isinstance(iterated, ast.Name | ast.Attribute):
        return True
    is_call = isinstance(iterated, ast.Call) and len(iterated.args) >= 1
    name = ast.unparse(iterated.func) if isinstance(iterated, ast.Call) else ""
    return is_call and name.split(".")[-1] in ("enumerate", "tqdm")


def ends_early(loop: ast.For) -> bool:
    leaving = (ast.Break, ast.Return, ast.Raise, ast.Yield)
    return any(isinstance(node, leaving) for node in ast.walk(loop))
