"""Run a function on several ranks of this machine; keep what they return."""

import contextlib
import itertools
import math
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Collection, Iterable
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from miniddp.launch import worker

GRACE_SECONDS = 5.0
"""How long the other ranks may still run after the first one has failed."""

HEAD_START_SECONDS = 0.05
"""How much later the end of a rank may be seen than that of its victims."""

Texts = dict[int, str]  # by rank


class RankResults(list[Any]):
    """`results[r]` is what rank r returned, `results.outputs[r]` its text."""

    def __init__(self, values: Iterable[Any], outputs: list[str]):
        super().__init__(values)
        self.outputs = outputs


class RanksFailed(RuntimeError):  # noqa: N818
    """Ranks raised or died: `tracebacks[rank]`, the first failure first."""

    def __init__(self, text: str, tracebacks: Texts, outputs: list[str]):
        super().__init__(text)
        self.tracebacks = tracebacks
        self.outputs = outputs


class RanksTimedOut(TimeoutError):  # noqa: N818
    """Ranks did not end in time: `stacks[rank]` is where they were."""

    def __init__(self, text: str, stacks: Texts, outputs: list[str]):
        super().__init__(text)
        self.stacks = stacks
        self.outputs = outputs


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str | None = "gloo",
    timeout: float = 60.0,
) -> RankResults:
    """Call `fn(rank, *args)` in `world_size` new processes that form a group.

    For Linux and macOS. `backend=None` starts no group, but sets torchrun's
    environment variables, so that `init_process_group()` works inside `fn`.
    `fn`, `args` and the results travel by cloudpickle: functions of a notebook
    work.

    Raises `RanksFailed` if a rank raises or dies, `RanksTimedOut` if one
    still runs after `timeout` seconds, `ValueError` for a bad `world_size` or
    `timeout`, `TypeError` for what cannot be pickled. No process is left.
    """
    if type(world_size) is not int or world_size < 1:
        raise ValueError(
            f"world_size must be an integer of at least 1, not {world_size!r}"
        )
    if not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
        raise ValueError(
            f"timeout must be a positive number of seconds, not {timeout!r}"
        )
    call = worker.dump((fn, args), "fn with its arguments")
    store = _store()
    environment = {
        "GLOO_SOCKET_IFNAME": socket.if_indextoname(1),  # the loopback
        **os.environ,
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store above
    }
    with tempfile.TemporaryDirectory(prefix="miniddp-") as folder:
        (Path(folder) / "call").write_bytes(call)
        homes = [Path(folder) / str(rank) for rank in range(world_size)]
        processes: list[BaseProcess] = []
        try:
            for home in homes:
                processes.append(_start(home, environment, backend))
            deadline = time.monotonic() + timeout
            failures, running = _wait(processes, homes, deadline)
            stacks = _stacks(running, homes)
        finally:
            for process in processes:
                _end(process)
        outputs = [worker.read(home / "output") for home in homes]
        if failures:
            text = _failed(world_size, failures, stacks)
            raise RanksFailed(text, failures, outputs)
        if running:
            text = _timed_out(world_size, timeout, stacks)
            raise RanksTimedOut(text, stacks, outputs)
        return RankResults(map(worker.load, homes), outputs)


def _store() -> Any:
    """For this machine only: by itself it would listen to all others too."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        return dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),  # the store's from now on
        )


_hiding_main = threading.Lock()


def _start(
    home: Path, environment: dict[str, str], backend: str | None
) -> BaseProcess:
    """Start a rank, forked from a server that has imported torch once."""
    home.mkdir()
    context = multiprocessing.get_context("forkserver")
    preloaded = [worker.__name__, "cloudpickle"]
    # torch.optim imports torch._dynamo, which takes a second. Not where there
    # is a GPU: a server that has touched CUDA would forbid it to the ranks.
    if not torch.cuda.is_available():
        preloaded.append("torch._dynamo")
    context.set_forkserver_preload(preloaded)
    process = context.Process(
        target=worker.main, args=(home, environment, backend)
    )
    with _hiding_main:
        main = sys.modules["__main__"]  # a rank would run its script again
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            process.start()
        finally:
            sys.modules["__main__"] = main
    return process


def _wait(
    processes: list[BaseProcess], homes: list[Path], deadline: float
) -> tuple[Texts, dict[int, BaseProcess]]:
    """The failures (the first one first), and the ranks that still run."""
    failures: Texts = {}
    ended: dict[int, float] = {}  # when those that failed did
    running = dict(enumerate(processes))
    while running and (left := deadline - time.monotonic()) > 0:
        sentinels = [process.sentinel for process in running.values()]
        ready = connection.wait(sentinels, left)
        for rank in [r for r, p in running.items() if p.sentinel in ready]:
            process = running.pop(rank)
            process.join()
            if process.exitcode or not (homes[rank] / "value").exists():
                failures[rank] = _failure(process, homes[rank])
                ended[rank] = time.monotonic()
                deadline = min(deadline, ended[rank] + GRACE_SECONDS)
    raised = {rank: _raised_at(homes[rank]) for rank in failures}
    order = _first_cause_first(ended, raised)
    return {rank: failures[rank] for rank in order}, running


def _first_cause_first(
    ended: dict[int, float], raised: dict[int, int]
) -> list[int]:
    """Ranks that raised by the moment of that, others by that of their end.

    One that died without a word has been the cause of what the others raised,
    also if their ends were seen a little earlier.
    """
    seen = {
        rank: end if raised[rank] else end - HEAD_START_SECONDS
        for rank, end in ended.items()
    }
    in_order = sorted(seen, key=lambda rank: seen[rank])
    speaking = [rank for rank in in_order if raised[rank]]
    by_moment = iter(sorted(speaking, key=lambda rank: raised[rank]))
    return [next(by_moment) if raised[rank] else rank for rank in in_order]


def _raised_at(home: Path) -> int:
    """When the rank left its traceback, in nanoseconds; 0 if it left none."""
    file = home / "traceback"
    return file.stat().st_mtime_ns if file.exists() else 0


def _failure(process: BaseProcess, home: Path) -> str:
    if text := worker.read(home / "traceback"):
        return text
    code = process.exitcode or 0
    how = "left without returning"
    if code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
    lines = worker.read(home / "output").splitlines()[-30:] or ["(none)"]
    return "\n".join([f"{how} (exit code {code}); its last output:", *lines])


def _stacks(running: dict[int, BaseProcess], homes: list[Path]) -> Texts:
    """Ask each running rank for its Python stack; wait 2 seconds at most."""
    files = {rank: homes[rank] / "stack" for rank in running}
    for process in running.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid or 0, signal.SIGUSR1)
    last_moment = time.monotonic() + 2
    while time.monotonic() < last_moment and not all(
        worker.__file__ in worker.read(file) for file in files.values()
    ):
        time.sleep(0.02)
    return {rank: _stack(worker.read(file)) for rank, file in files.items()}


def _stack(dump: str) -> str:
    """faulthandler's text without its headline and without what called fn."""
    lines = dump.splitlines()[1:]
    above = itertools.takewhile(lambda at: worker.__file__ not in at, lines)
    return "\n".join(above) or "  (its Python stack could not be read)"


def _end(process: BaseProcess) -> None:
    """Kill a rank and everything that it started in its session."""
    assert process.pid is not None
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()
    process.join(5)


def _failed(world_size: int, failures: Texts, stacks: Texts) -> str:
    first, *later = failures
    head = f"rank {first} of {world_size} failed"
    if later:
        head += f", then {_names(later)}"
    texts = [f"rank {rank}: {text.strip()}" for rank, text in failures.items()]
    return "\n\n".join([head, *texts, *_places(stacks)])


def _timed_out(world_size: int, timeout: float, stacks: Texts) -> str:
    left = f"{_names(stacks)} of {world_size}"
    head = f"{left} did not end within {timeout:g} s"
    returned = [rank for rank in range(world_size) if rank not in stacks]
    if returned:
        head += f" ({_names(returned)} had returned)"
    return "\n\n".join([head, *_places(stacks)])


def _places(stacks: Texts) -> list[str]:
    return [f"rank {rank} was in\n{text}" for rank, text in stacks.items()]


def _names(ranks: Collection[int]) -> str:
    plural = "s" if len(ranks) > 1 else ""
    return f"rank{plural} {', '.join(map(str, ranks))}"
