"""One watched process: its probes, and from when it is a rank, its exchange."""

import multiprocessing
import multiprocessing.util
import os
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch.distributed as dist

from miniddp.check.around import stand_around
from miniddp.check.data_probes import DataProbes
from miniddp.check.exchange import Exchange
from miniddp.check.finding import Run
from miniddp.check.probes import Probes
from miniddp.check.recorder import Recorder
from miniddp.check.report import Report

WORKERS = "torch.utils.data"
DEFAULT_TIMEOUT_SECONDS = 1800.0


class Options(NamedTuple):
    steps: int
    as_json: bool
    verdict: str
    """A file to which a rank adds what it found: `0` or more findings."""


class Session:
    def __init__(self, options: Options) -> None:
        self.options = options
        self.recorder = Recorder(options.steps)
        self.exchange: Exchange | None = None
        self.report = Report(options.as_json)
        self.pid = 0
        self.names: dict[str, Any] = {}
        """The script's, which live until the end of the process, as ever."""

    def install(self) -> None:
        Probes(self.recorder).install()
        DataProbes(self.recorder).install()
        stand_around(dist, "init_process_group", self.init_process_group)
        stand_around(BaseProcess, "__init__", self.start_process)

    def init_process_group(
        self, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        result = original(*args, **kwargs)
        timeout = kwargs.get("timeout")
        seconds = (
            timeout.total_seconds() if timeout else DEFAULT_TIMEOUT_SECONDS
        )
        if self.pid != os.getpid():
            self.pid = os.getpid()
            self.begin(seconds)
        return result

    def begin(self, timeout: float) -> None:
        """This process is a rank from now on."""
        world_size = dist.get_world_size()
        self.write_verdict(f"ranks {world_size}")
        if world_size == 1:
            self.recorder.is_watching = False
            return
        self.recorder.ranks = tuple(range(world_size))
        store: Any = dist.distributed_c10d._get_default_store()
        self.exchange = Exchange(
            self.recorder,
            store,
            dist.get_rank(),
            world_size,
            timeout,
            self.tell,
        )
        self.exchange.start()
        if multiprocessing.parent_process() is not None:
            multiprocessing.util.Finalize(None, self.finish, exitpriority=10)

    def tell(self, run: Run) -> None:
        if self.exchange is not None:
            self.report.tell(run, self.exchange.is_first)
            self.write_verdict(f"findings {self.report.told}")

    def write_verdict(self, line: str) -> None:
        with open(self.options.verdict, "a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    def finish(self, has_failed: bool = False) -> None:
        if self.exchange is not None and self.pid == os.getpid():
            self.exchange.finish(has_failed)
            self.exchange = None

    def start_process(
        self,
        original: Callable[..., Any],
        process: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """A process that the script starts may become a rank."""
        target = kwargs.get("target")
        if target is not None and not target.__module__.startswith(WORKERS):
            kwargs["target"] = Watched(target, self.options)
        return original(process, *args, **kwargs)


class Watched:
    """What a new process calls: its probes first, unless it is a fork."""

    def __init__(self, target: Callable[..., Any], options: Options) -> None:
        self.target = target
        self.options = options

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start(self.options)
        return self.target(*args, **kwargs)


_sessions: list[Session] = []


def start(options: Options) -> Session:
    """Of this process; a fork has that of its parent."""
    if not _sessions:
        _sessions.append(Session(options))
        _sessions[0].install()
    return _sessions[0]
