"""Run a function on several ranks of this machine; keep what each of them returns and prints."""

import contextlib
import faulthandler
import itertools
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from miniddp import worker

GRACE_SECONDS = 5.0
"""How long the other ranks may still run after the first one has failed."""


class RankResults(list[Any]):
    """`results[r]` is what rank r returned, `results.outputs[r]` the text that it printed."""

    def __init__(self, values: Sequence[Any], outputs: Sequence[str]) -> None:
        super().__init__(values)
        self.outputs = list(outputs)


class RanksFailed(RuntimeError):  # noqa: N818
    """At least one rank raised or died. `tracebacks` maps rank to text, the first failure first."""

    def __init__(self, message: str, tracebacks: Mapping[int, str], outputs: Sequence[str]) -> None:
        super().__init__(message)
        self.tracebacks = dict(tracebacks)
        self.outputs = list(outputs)


class RanksTimedOut(TimeoutError):  # noqa: N818
    """Ranks did not end in time. `stacks` maps each of them to the Python stack it was in."""

    def __init__(self, message: str, stacks: Mapping[int, str], outputs: Sequence[str]) -> None:
        super().__init__(message)
        self.stacks = dict(stacks)
        self.outputs = list(outputs)


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str | None = "gloo",
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
) -> RankResults:
    """Call `fn(rank, *args)` in `world_size` new processes that form one process group.

    `backend=None` starts no group, but sets torchrun's environment variables, so that
    `init_process_group()` works inside `fn`. `env` adds environment variables. `fn`, `args` and
    the results travel by cloudpickle: functions of a notebook work.

    Raises `RanksFailed` if a rank raises or dies, `RanksTimedOut` if one still runs `timeout`
    seconds after the start, `ValueError` for a bad `world_size` or `timeout`. No process is left
    behind.
    """
    if not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size must be an integer of at least 1, not {world_size!r}")
    if timeout <= 0:
        raise ValueError(f"timeout must be a positive number of seconds, not {timeout!r}")
    with tempfile.TemporaryDirectory(prefix="miniddp-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "call").write_bytes(worker.dump((fn, args), "fn with its arguments"))
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        environment = _environment(world_size, store.port) | dict(env or {})
        processes: list[BaseProcess] = []
        stacks: dict[int, str] = {}
        try:
            for rank in range(world_size):
                processes.append(_start(folder, rank, environment, backend))
            failures, running = _wait(processes, folder, time.monotonic() + timeout)
            if running:
                stacks = _stacks(running, folder)
        finally:
            for process in processes:
                _end(process)
        outputs = [_read(folder / f"{rank}.output") for rank in range(world_size)]
        if failures:
            raise RanksFailed(_failed(failures, stacks, world_size), failures, outputs)
        if running:
            raise RanksTimedOut(_timed_out(stacks, timeout, world_size), stacks, outputs)
        values = [worker.load(folder / f"{rank}.value") for rank in range(world_size)]
        return RankResults(values, outputs)


def _environment(world_size: int, port: int) -> dict[str, str]:
    """This process's variables and torchrun's; the store of this process is the rendezvous."""
    return {
        **os.environ,
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _start(
    folder: Path, rank: int, environment: Mapping[str, str], backend: str | None
) -> BaseProcess:
    """Start one rank. A fork server imports torch once; where there is none, each rank does."""
    context: Any = multiprocessing.get_context("spawn")
    if "forkserver" in multiprocessing.get_all_start_methods():
        context = multiprocessing.get_context("forkserver")
        # torch.optim imports torch._dynamo, which takes a second. Not where there is a GPU:
        # a fork server that has touched CUDA would forbid it to the ranks.
        also = [] if torch.cuda.is_available() else ["torch._dynamo"]
        context.set_forkserver_preload([worker.__name__, *also])
    environment = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    process: BaseProcess = context.Process(
        target=worker.main, args=(folder, rank, environment, backend), name=f"rank {rank}"
    )
    with _hidden_main():
        process.start()
    return process


_hiding_main = threading.Lock()


@contextlib.contextmanager
def _hidden_main() -> Iterator[None]:
    """Keep a new process from running the caller's script again, guarded or not."""
    with _hiding_main:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def _wait(
    processes: Sequence[BaseProcess], folder: Path, deadline: float
) -> tuple[dict[int, str], dict[int, BaseProcess]]:
    """Return the failures (rank to traceback, in order) and the ranks that still run."""
    failures: dict[int, str] = {}
    running = dict(enumerate(processes))
    while running and (left := deadline - time.monotonic()) > 0:
        ended = connection.wait([process.sentinel for process in running.values()], left)
        for rank in [rank for rank, process in running.items() if process.sentinel in ended]:
            process = running.pop(rank)
            process.join()
            if not (folder / f"{rank}.value").exists():
                text = _read(folder / f"{rank}.traceback")
                failures[rank] = text or _death(process, _read(folder / f"{rank}.output"))
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    in_order = sorted(failures, key=lambda rank: _moment(folder / f"{rank}.traceback"))
    return {rank: failures[rank] for rank in in_order}, running


def _moment(file: Path) -> int:
    """When a rank raised. A rank that died leaves no file and comes first: it was the cause."""
    return file.stat().st_mtime_ns if file.exists() else 0


def _death(process: BaseProcess, output: str) -> str:
    code = process.exitcode or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else "left without returning"
    last_lines = "\n".join(output.splitlines()[-30:])
    return f"{how} (exit code {code}); its last output:\n{last_lines or '(none)'}\n"


def _stacks(running: Mapping[int, BaseProcess], folder: Path) -> dict[int, str]:
    """Ask each running rank for its Python stack and wait 2 seconds at most for the answers."""
    if hasattr(faulthandler, "register"):
        for process in running.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid or 0, signal.SIGUSR1)
        last_moment = time.monotonic() + 2
        files = [folder / f"{rank}.stack" for rank in running]
        while time.monotonic() < last_moment and not all(_read(file) for file in files):
            time.sleep(0.02)
        time.sleep(0.1)
    return {rank: _stack(_read(folder / f"{rank}.stack")) for rank in running}


def _stack(dump: str) -> str:
    """faulthandler's text without its headline and without the frames below `fn`."""
    below = f'File "{worker.__file__}"'
    frames = itertools.takewhile(lambda line: below not in line, dump.splitlines()[1:])
    return "\n".join(frames) or "  (its Python stack could not be read)"


def _end(process: BaseProcess) -> None:
    """Kill a rank and everything that it started in its session."""
    if process.pid is None:
        return
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (AttributeError, ProcessLookupError, PermissionError):
        process.kill()
    process.join(5)


def _failed(failures: Mapping[int, str], stacks: Mapping[int, str], world_size: int) -> str:
    first, *later = failures
    head = f"rank {first} of {world_size} failed" + (f", then {_names(later)}" if later else "")
    parts = [head, *(f"rank {rank}: {text.strip()}" for rank, text in failures.items())]
    parts += [f"rank {rank} was ended while it was in\n{text}" for rank, text in stacks.items()]
    return "\n\n".join(parts)


def _timed_out(stacks: Mapping[int, str], timeout: float, world_size: int) -> str:
    head = f"{_names(list(stacks))} of {world_size} did not end within {timeout:g} s"
    if returned := [rank for rank in range(world_size) if rank not in stacks]:
        head += f" ({_names(returned)} had returned)"
    return "\n\n".join([head, *(f"rank {rank} was in\n{text}" for rank, text in stacks.items())])


def _names(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _read(file: Path) -> str:
    return file.read_bytes().decode("utf-8", "replace") if file.exists() else ""
