"""Who is slow, who is stuck? A failed collective blames the ranks that waited.

So each rank says in torchrun's store, beside the process group, how many
collectives it has called and where it is. Who waits reads what the others say.
"""

import json
import logging
import os
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from miniddp.process import device

SLOW = 1.5  # times what a step takes on the others
logger = logging.getLogger(__name__)


@contextmanager
def watching(timeout: float) -> Iterator[None]:
    """Name the ranks for which this one waits for half the timeout.

    As an error of the log, by one rank, and in the error of the collective.
    """
    if dist.get_world_size() == 1:
        yield
        return
    watch = Watch(timeout / 2)
    dist.barrier()  # all have said something
    watch.start()
    try:
        yield
    except RuntimeError as error:
        if watch.named:
            error.add_note(watch.named)
        raise
    finally:
        watch.done.set()
        watch.join(1)  # not for ever: a store that is lost never answers
    dist.barrier()  # nobody uses the store any more: it may end


class Watch(threading.Thread):
    """Says where this rank is; listens while the rank waits."""

    def __init__(self, patience: float) -> None:
        super().__init__(daemon=True)
        self.patience, self.done, self.named = patience, threading.Event(), ""
        ranks = range(dist.get_world_size())
        self.keys = [f"rank {rank} is there" for rank in ranks]
        at = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        wait = timedelta(seconds=max(1.0, patience / 2))
        self.store: Any = dist.TCPStore(*at, timeout=wait)  # type: ignore[attr-defined]
        self.say()

    def say(self) -> int:
        """How many collectives this rank has called."""
        group: Any = dist.group.WORLD
        calls = group._get_sequence_number_for_group()
        text = json.dumps([time.monotonic(), calls, place()])
        self.store.set(self.keys[dist.get_rank()], text)
        return int(calls)

    def run(self) -> None:
        """Until `done`, or until the store does not answer."""
        with suppress(RuntimeError):
            self.listen()

    def listen(self) -> None:
        calls, since = -1, 0.0
        heard: list[list[bytes]] = []
        of_rank_0 = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "False"
        whom = "rank 0" if of_rank_0 else "torchrun"
        while not self.done.wait(self.patience / 10):
            now, before = time.monotonic(), calls
            calls = self.say()
            if calls != before:
                since, heard, self.named = now, [], ""
            if now - since < self.patience / 2 or self.named:
                continue
            self.named = f"the others wait for {whom}, whose store is silent"
            heard = [*heard[-4:], self.store.multi_get(self.keys)]
            ranks, self.named = missing(heard)
            others = {*range(len(self.keys))} - ranks
            if ranks and dist.get_rank() == min(others):
                logger.error(self.named)


def missing(heard: list[list[bytes]]) -> tuple[set[int], str]:
    """Who says nothing any more, or else is behind; nobody until heard 5 times.

    `heard[-1][rank]` is what a rank said last.
    """
    if len(heard) < 5:
        return set(), ""
    told = [json.loads(text) for text in heard[-1]]
    most = max(calls for _, calls, _ in told)
    ranks = {r for r, text in enumerate(heard[-1]) if text == heard[-4][r]}
    verb = "last heard of in" if ranks else "in"
    ranks = ranks or {r for r, beat in enumerate(told) if beat[1] < most}
    names = [f"rank {r} ({verb} {told[r][2]})" for r in sorted(ranks)]
    text = f"the others wait for {', '.join(names)}"
    return ranks, text[:300] if ranks else ""


def place() -> str:
    """Where the main thread is, outside of torch."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    for at, line in traceback.walk_stack(frame):
        path = Path(at.f_code.co_filename)
        if "torch" not in path.parts:
            return f"{path.name}:{line} in {at.f_code.co_name}"
    return "torch"


class Pace:
    """How long this rank's steps take before it waits: `with pace:` for each.

    Every so many, a rank that is far slower than the others is named, once.
    Until the first parameter has its gradient, backward's last. A GPU works on
    meanwhile: there it shows a host that is slow, its data or its Python.
    """

    def __init__(self, module: nn.Module, every: int) -> None:
        self.every, self.steps, self.seconds, self.named = every, 0, 0.0, -1
        self.begun = self.ready = 0.0
        first: Any = next(module.parameters())
        first.register_post_accumulate_grad_hook(self.note)

    def note(self, _: Tensor) -> None:
        self.ready = time.perf_counter()

    def __enter__(self) -> None:
        self.begun = time.perf_counter()

    def __exit__(self, kind: object, *_: object) -> None:
        self.steps += 1
        self.seconds += self.ready - self.begun
        if kind is None and self.steps == self.every:
            self.compare()

    def compare(self) -> None:
        everyone = torch.zeros(dist.get_world_size(), device=device())
        everyone[dist.get_rank()] = self.seconds / self.steps
        dist.all_reduce(everyone)
        self.steps, self.seconds = 0, 0.0
        *others, slowest = everyone.sort().values.tolist()
        rank = int(everyone.argmax())
        usual = statistics.median_high(others or [slowest])
        if slowest > SLOW * usual and rank != self.named:
            self.named = rank
            text = "rank %d is slow: %.0f ms of a step, the others %.0f ms"
            logger.warning(text, rank, slowest * 1e3, usual * 1e3)
