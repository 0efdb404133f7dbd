"""One watched process: its probes, and from when it is a rank, its exchange."""

import functools
import multiprocessing
import multiprocessing.util
import os
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from miniddp.check import call_probes, data_probes, training_probes
from miniddp.check.exchange import Exchange
from miniddp.check.finding import Run
from miniddp.check.probe import Call, Notes, stand_around
from miniddp.check.recorder import Recorder
from miniddp.check.report import tell
from miniddp.check.trained import Trained

WORKERS = "torch.utils.data"


class Options(NamedTuple):
    steps: int | None
    epochs: int | None
    as_json: bool
    verdict: str
    """A file to which a process adds how many ranks there are, and `found`."""


class Session:
    def __init__(self, options: Options) -> None:
        self.options = options
        self.recorder = Recorder(options.steps, options.epochs)
        self.exchange: Exchange | None = None
        self.pid = 0
        self.names: dict[str, Any] = {}
        """The script's, which live until the end of the process, as ever."""
        self.group: dist.ProcessGroup | None = None
        """Kept: a thread of gloo may not be the last to let go of it."""

    def install(self) -> None:
        trained = Trained()
        call_probes.install(self.recorder, trained)
        data_probes.install(self.recorder)
        training_probes.install(self.recorder, trained)
        watch = functools.partial(stand_around, self.recorder)
        watch(dist, "init_process_group", self.init_process_group)
        watch(BaseProcess, "__init__", self.start_process)
        watch(os, "_exit", self.leave)

    def init_process_group(self, call: Call) -> Notes:
        yield
        if self.pid == os.getpid():
            return
        self.pid = os.getpid()
        timeout = call.argument(2, "timeout") or default_pg_timeout
        self.begin(timeout.total_seconds())

    def begin(self, timeout: float) -> None:
        """This process is a rank from now on."""
        world_size = dist.get_world_size()
        self.write_verdict(f"ranks {world_size}")
        if world_size == 1:
            self.recorder.is_watching = False
            return
        self.recorder.ranks = tuple(range(world_size))
        self.group = dist.group.WORLD
        rank = dist.get_rank()
        self.exchange = Exchange(self.recorder, rank, timeout, self.tell)
        self.exchange.start()
        if multiprocessing.parent_process() is not None:
            multiprocessing.util.Finalize(None, self.finish, exitpriority=10)

    def tell(self, run: Run, is_first: Callable[[str], bool]) -> None:
        if tell(run, self.options.as_json, is_first):
            self.write_verdict("found")

    def write_verdict(self, line: str) -> None:
        with open(self.options.verdict, "a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    def finish(self, has_failed: bool = False) -> None:
        if self.exchange is not None and self.pid == os.getpid():
            self.exchange.finish(has_failed)
            self.exchange = None

    def leave(self, call: Call) -> Notes:
        """The script ends this process without a word."""
        self.finish(has_failed=call.argument(0, "status") != 0)
        yield

    def start_process(self, call: Call) -> Notes:
        """A process that the script starts may become a rank."""
        target = call.keywords.get("target")
        module = getattr(target, "__module__", None) or ""
        if target is not None and not module.startswith(WORKERS):
            watched = functools.partial(start_and_call, target, self.options)
            call.keywords["target"] = watched
        yield


def start_and_call(
    target: Callable[..., Any], options: Options, *args: Any, **keywords: Any
) -> Any:
    """What a new process calls: its probes first, unless it is a fork."""
    start(options)
    return target(*args, **keywords)


@functools.cache
def start(options: Options) -> Session:
    """Of this process; a fork has that of its parent."""
    session = Session(options)
    session.install()
    return session
