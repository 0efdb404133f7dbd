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
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from miniddp.process import device

SLOW = 1.5  # times what a step takes on the others
REPORTS_NEEDED = 5
logger = logging.getLogger(__name__)


@contextmanager
def watching(timeout: float) -> Iterator[None]:
    """Name the ranks for which this one waits for half the timeout.

    One rank logs them, as an error: so it stands there before the timeout.
    Then gloo raises, and its error has the names too. NCCL raises nothing: its
    watchdog ends the process, by SIGABRT, and no line of Python runs any more.
    """
    if dist.get_world_size() == 1:
        yield
        return
    watch = Watch(timeout / 2)
    dist.barrier()  # all have reported
    watch.start()
    try:
        yield
    except RuntimeError as error:
        if watch.complaint:
            error.add_note(watch.complaint)
        raise
    finally:
        watch.is_over.set()
        watch.join(1)  # not for ever: a store that is lost never answers
    dist.barrier()  # nobody uses the store any more: it may end


class Report(NamedTuple):
    """What a rank says: when, the collectives it has called, where it is."""

    seconds: float
    calls: int
    location: str


class Watch(threading.Thread):
    """Reports where this rank is; reads the others' reports while it waits."""

    def __init__(self, patience: float) -> None:
        super().__init__(daemon=True)
        self.patience = patience
        self.is_over = threading.Event()
        self.complaint = ""
        self.keys = [f"rank {rank} is there" for rank in range(dist.get_world_size())]
        self.store: Any = dist.TCPStore(  # type: ignore[attr-defined]
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            timeout=timedelta(seconds=max(1.0, patience / 2)),
        )
        self.report()

    def report(self) -> int:
        """How many collectives this rank has called."""
        calls = collectives_called()
        report = Report(time.monotonic(), calls, main_thread_location())
        self.store.set(self.keys[dist.get_rank()], json.dumps(report))
        return calls

    def run(self) -> None:
        """Until it is over, or until the store does not answer."""
        try:
            self.listen()
        except RuntimeError:
            if not self.is_over.is_set():
                self.complain_about_store()

    def listen(self) -> None:
        calls = -1
        waiting_since = 0.0
        rounds: list[list[bytes]] = []
        while not self.is_over.wait(self.patience / 10):
            now = time.monotonic()
            calls_before = calls
            calls = self.report()
            if calls != calls_before:
                waiting_since = now
                rounds = []
                self.complaint = ""
            if now - waiting_since < self.patience / 2 or self.complaint:
                continue
            self.complaint = self.about_store()  # until it answers: it may never
            rounds.append(self.store.multi_get(self.keys))
            ranks, self.complaint = missing(rounds[-REPORTS_NEEDED:])
            waiting = set(range(len(self.keys))) - ranks
            if ranks and dist.get_rank() == min(waiting):
                logger.error(self.complaint)

    def complain_about_store(self) -> None:
        """Once on each machine: the ranks cannot agree on one that does."""
        self.complaint = self.about_store()
        if int(os.environ.get("LOCAL_RANK", 0)) == 0:
            logger.error(self.complaint)

    def about_store(self) -> str:
        on_rank_0 = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "False"
        owner = "rank 0" if on_rank_0 else "torchrun"
        return f"the others wait for {owner}, whose store is silent"


def collectives_called() -> int:
    """By this rank, over all backends of the group: gloo beside NCCL, too."""
    group: Any = dist.group.WORLD
    backends = {group._get_backend(device) for device in group._device_types}
    return sum(backend._get_sequence_number_for_group() for backend in backends)


def missing(rounds: list[list[bytes]]) -> tuple[set[int], str]:
    """Who reports nothing any more, or else is behind, and a line about them.

    Nobody until there are five rounds; `rounds[-1][rank]` is a rank's newest.
    """
    if len(rounds) < REPORTS_NEEDED:
        return set(), ""
    reports = [Report(*json.loads(text)) for text in rounds[-1]]
    ranks = range(len(reports))
    silent = {rank for rank in ranks if rounds[-1][rank] == rounds[-4][rank]}
    most_calls = max(report.calls for report in reports)
    behind = {rank for rank in ranks if reports[rank].calls < most_calls}
    guilty = silent or behind
    if not guilty:
        return set(), ""
    verb = "last heard of in" if silent else "in"
    names = [f"rank {r} ({verb} {reports[r].location})" for r in sorted(guilty)]
    return guilty, f"the others wait for {', '.join(names)}"[:300]


def main_thread_location() -> str:
    """Where the main thread is, outside of torch."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    for caller, line in traceback.walk_stack(frame):
        module = caller.f_globals.get("__name__", "")
        if module.partition(".")[0] != "torch":
            return f"{source_of(caller)}:{line} in {caller.f_code.co_name}"
    return "torch"


def source_of(frame: FrameType) -> str:
    """The name of a frame's file, or its module's where it has none.

    cloudpickle, by which `run_ranks` sends a function, calls it
    "<dynamic-code>" from 3.1.3 on.
    """
    file = frame.f_code.co_filename
    if file.startswith("<"):
        module: str = frame.f_globals.get("__name__", file)
        return module.rpartition(".")[2]
    return Path(file).name


class Pace:
    """How long this rank's steps take before it waits: `with pace:` for each.

    Every so many, a rank that is far slower than the others is named, once.
    Until the first parameter has its gradient, backward's last. A GPU works on
    meanwhile: there it shows a host that is slow, its data or its Python.
    """

    def __init__(self, module: nn.Module, every: int) -> None:
        self.every = every
        self.steps = 0
        self.seconds = 0.0
        self.begun = 0.0
        self.ready = 0.0
        self.named: int | None = None
        first: Any = next(module.parameters())
        first.register_post_accumulate_grad_hook(self.note)

    def note(self, _: Tensor) -> None:
        self.ready = time.perf_counter()

    def __enter__(self) -> None:
        self.begun = time.perf_counter()

    def __exit__(self, error_type: object, *_: object) -> None:
        self.steps += 1
        self.seconds += self.ready - self.begun
        if error_type is None and self.steps == self.every:
            self.compare()

    def compare(self) -> None:
        seconds_per_step = torch.zeros(dist.get_world_size(), device=device())
        seconds_per_step[dist.get_rank()] = self.seconds / self.steps
        dist.all_reduce(seconds_per_step)
        self.steps = 0
        self.seconds = 0.0
        *others, slowest = seconds_per_step.sort().values.tolist()
        rank = int(seconds_per_step.argmax())
        usual = statistics.median_high(others or [slowest])
        if slowest > SLOW * usual and rank != self.named:
            self.named = rank
            text = "rank %d is slow: %.0f ms of a step, the others %.0f ms"
            logger.warning(text, rank, slowest * 1e3, usual * 1e3)
