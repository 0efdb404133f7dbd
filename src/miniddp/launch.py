"""Run a function on several ranks of this machine, and keep what each of them returns and prints."""

import contextlib
import faulthandler
import functools
import io
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from miniddp.process import init_process_group

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

    Raises `RanksFailed` if a rank raises or dies, `RanksTimedOut` if a rank still runs after
    `timeout` seconds, `ValueError` for a bad `world_size` or `timeout`. No process is left behind.
    """
    if not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size must be an integer of at least 1, not {world_size!r}")
    if timeout <= 0:
        raise ValueError(f"timeout must be a positive number of seconds, not {timeout!r}")
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory(prefix="miniddp-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "call").write_bytes(_dump((fn, args), "fn and its arguments"))
        store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=300)
        )
        environment = {**os.environ, **_rank_environment(world_size, store.port), **(env or {})}
        processes: list[BaseProcess] = []
        stacks: dict[int, str] = {}
        try:
            for rank in range(world_size):
                processes.append(_start(folder, rank, environment, backend))
            failures, running = _wait(processes, folder, deadline)
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
        return RankResults([_load(folder, rank) for rank in range(world_size)], outputs)


# In the parent


def _rank_environment(world_size: int, port: int) -> dict[str, str]:
    """torchrun's variables that are the same on every rank; the parent's store is the rendezvous."""
    return {
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
    has_server = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if has_server else "spawn")
    if has_server:
        context.set_forkserver_preload([__name__])
    environment = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    process = context.Process(  # type: ignore[attr-defined]
        target=_rank_main, args=(folder, rank, environment, backend), name=f"rank {rank}"
    )
    with _hidden_main():
        process.start()
    return process  # type: ignore[no-any-return]


_hiding_main = threading.Lock()


@contextlib.contextmanager
def _hidden_main() -> Iterator[None]:
    """Keep a new process from running the parent's script again, guarded main or not."""
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
                failures[rank] = _read(folder / f"{rank}.traceback") or _death(process, folder)
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    in_order = sorted(failures, key=lambda rank: _moment(folder / f"{rank}.traceback"))
    return {rank: failures[rank] for rank in in_order}, running


def _moment(file: Path) -> int:
    """When a rank raised. A rank that died leaves no file and comes first: it was the cause."""
    return file.stat().st_mtime_ns if file.exists() else 0


def _death(process: BaseProcess, folder: Path) -> str:
    """Say how a process ended that left neither value nor traceback."""
    code = process.exitcode or 0
    how = f"signal {signal.Signals(-code).name}" if code < 0 else "leaving the interpreter"
    last_words = _read(folder / f"{process.name.split()[1]}.output").splitlines()[-30:]
    return "\n".join([f"ended by {how}, exit code {code}; its last output:", *last_words, ""])


def _stacks(running: Mapping[int, BaseProcess], folder: Path) -> dict[int, str]:
    """Ask each running rank where it is; one that cannot answer within 2 s gets a note."""
    if hasattr(faulthandler, "register"):
        for process in running.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid or 0, signal.SIGUSR1)
        files = [folder / f"{rank}.stack" for rank in running]
        last_moment = time.monotonic() + 2
        while time.monotonic() < last_moment and not all(_read(file) for file in files):
            time.sleep(0.02)
        time.sleep(0.1)
    return {rank: _stack(_read(folder / f"{rank}.stack")) for rank in running}


def _stack(dump: str) -> str:
    """Leave this module's frames and those that called it out of faulthandler's text."""
    own = f'File "{__file__}"'
    lines = itertools.takewhile(lambda line: own not in line, dump.splitlines()[1:])
    return "\n".join(lines) or "  (its Python stack could not be read)"


def _end(process: BaseProcess) -> None:
    """Kill a rank and everything it started in its session."""
    if process.pid is None:
        return
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (AttributeError, ProcessLookupError, PermissionError):
        process.kill()
    process.join()


def _failed(failures: Mapping[int, str], stacks: Mapping[int, str], world_size: int) -> str:
    first = next(iter(failures))
    head = f"rank {first} of {world_size} failed"
    if len(failures) > 1:
        head += f", then {_names(list(failures)[1:])}"
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


def _load(folder: Path, rank: int) -> Any:
    try:
        return pickle.loads((folder / f"{rank}.value").read_bytes())
    except Exception as error:
        raise TypeError(f"the value that rank {rank} returned cannot be read: {error}") from error


# In each rank


def _rank_main(
    folder: Path, rank: int, environment: Mapping[str, str], backend: str | None
) -> None:
    """What a rank's process runs. It leaves `<rank>.value` or `<rank>.traceback` in `folder`."""
    if hasattr(os, "setsid"):
        os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)
    _keep_output(folder / f"{rank}.output")
    stack = (folder / f"{rank}.stack").open("w")
    faulthandler.enable()
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
    torch.set_num_threads(max(1, _cpu_count() // int(environment["LOCAL_WORLD_SIZE"])))
    try:
        fn, args = pickle.loads((folder / "call").read_bytes())
        if backend is not None:
            init_process_group(backend)
        value = fn(rank, *args)
        if dist.is_initialized():
            dist.destroy_process_group()
        _write(folder / f"{rank}.value", _dump(value, f"the value that rank {rank} returned"))
    except BaseException as error:
        frames = error.__traceback__ and error.__traceback__.tb_next
        text = "".join(traceback.format_exception(type(error), error, frames))
        _write(folder / f"{rank}.traceback", text.encode())
    sys.stdout.flush()
    # Leave at once: a thread or a child that fn forgot must not keep the rank.
    os._exit(0)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    if hasattr(os, "killpg"):
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _keep_output(file: Path) -> None:
    """Send everything this process and its children print to a file, in the order it is printed."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)


def _write(file: Path, data: bytes) -> None:
    """Write all or nothing: a rank that is killed meanwhile leaves no half file."""
    part = file.with_suffix(".part")
    part.write_bytes(data)
    part.replace(file)


def _cpu_count() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# In both


def _dump(value: object, what: str) -> bytes:
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(value)
    except Exception as error:
        raise TypeError(f"{what} cannot be pickled: {error}") from error
    return buffer.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle that also sends by value what a new process could not import."""

    def reducer_override(self, value: Any) -> Any:
        module = sys.modules.get(str(getattr(value, "__module__", None)))
        if module is not None and not _is_importable(module):
            cloudpickle.register_pickle_by_value(module)
        return super().reducer_override(value)


@functools.cache
def _is_importable(module: types.ModuleType) -> bool:
    """Whether `sys.path` leads from the module's name to its file."""
    if not getattr(module, "__file__", None) or module.__name__ == "__main__":
        return True
    file = Path(str(module.__file__)).resolve()
    path = file.parent if file.stem == "__init__" else file.with_suffix("")
    parts = tuple(module.__name__.split("."))
    roots = {Path(entry).resolve() for entry in sys.path}
    return path.parts[-len(parts) :] == parts and path.parents[len(parts) - 1] in roots
