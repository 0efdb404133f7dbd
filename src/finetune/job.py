"""A job of many ranks as one command: one log, one error, one exit code.

A rank that fails alone leaves, and the others wait for it in vain. So work
that may fail goes through `succeed_together`.
"""

import ctypes
import hashlib
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from miniddp.process import destroy_process_group, init_process_group

T = TypeVar("T")
Error = type[Exception]


MOST = 1000  # characters of an error
PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal when the parent ends


def start(timeout: int = 600) -> None:
    """Start torchrun's process group, or one of one rank. Only rank 0 logs.

    A collective fails after `timeout` seconds. If torchrun is killed, Linux
    kills the ranks: nobody would stop or restart them.
    """
    rank = int(os.environ.get("RANK", 0))
    if rank != 0:
        os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    level = logging.ERROR if rank else logging.INFO
    logging.basicConfig(level=level, format="%(message)s")
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if "RANK" in os.environ:
        init_process_group(timeout=timedelta(seconds=timeout))
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        init_process_group(store=store, rank=0, world_size=1)


def succeed_together(work: Callable[[], T], kind: Error, where: str = "") -> T:
    """This rank's `work()`; if it raises on any rank, a `kind` on all.

    The message is one line: `where`, the lowest rank that failed unless all
    did alike, and its error.
    """
    value, problem, line = None, None, ""
    try:
        value = work()
    except Exception as error:
        text = error.strerror if isinstance(error, OSError) else None
        words = (text or str(error)).split() or [type(error).__name__]
        problem, line = error, " ".join(words)
    lines = [""] * dist.get_world_size()
    dist.all_gather_object(lines, line)
    for rank, line in enumerate(lines):
        if line:
            who = "" if set(lines) == {line} else f"rank {rank}: "
            raise kind(where + who + line) from problem
    return value  # type: ignore[return-value]


def check_alike(facts: Mapping[str, Any], kind: Error) -> None:
    """Raise a `kind` on every rank for a fact that differs between ranks."""
    everyone = [facts] * dist.get_world_size()
    dist.all_gather_object(everyone, facts)
    for rank, others in enumerate(everyone):
        for name, value in everyone[0].items():
            if others.get(name) != value:
                here, there = (str(v)[:100] for v in (value, others.get(name)))
                text = f"{name} is {here} on rank 0, and {there} on rank {rank}"
                raise kind(text)


def versions() -> dict[str, str]:
    """Of what trains: libraries, and a SHA-256 of this package's code."""
    code = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        code.update(file.read_bytes())
    libraries = {name: version(name) for name in ("torch", "transformers")}
    return {**libraries, "SHA-256 of miniddp": code.hexdigest()[:16]}


class Stopped(Exception):  # noqa: N818
    """The job was asked to stop by a signal. Started again, it goes on."""


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Within it, SIGTERM and SIGINT do nothing but add to the list."""
    asked: list[int] = []
    numbers = signal.SIGTERM, signal.SIGINT
    before = [signal.signal(n, lambda n, _: asked.append(n)) for n in numbers]
    try:
        yield asked
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def said_before() -> str | None:
    """The error that the ranks left with before torchrun restarted them."""
    file = _last_words()
    return file.read_text() if file and file.exists() else None


def _last_words() -> Path | None:
    """A file of this torchrun; each restart has a folder of its own in it."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(file).parents[2] / "last_words" if file else None


def say_once(line: str) -> None:
    """Show an error that every rank has, as the last line of the job.

    torchrun ends its own output with the error file of the rank that failed
    first, and stops the others: so the others leave after rank 0. A restart
    mends nothing: see `said_before`.
    """
    words = " ".join(line.split())[:MOST]
    line = words.encode(errors="backslashreplace").decode()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    last_words = _last_words()
    if last_words and not last_words.exists():  # else a rank may be reading it
        last_words.write_text(line)
    if dist.get_rank() != 0:
        dist.barrier()
        time.sleep(1)
        return
    if not _tell_torchrun(line, line):
        print(line, file=sys.stderr)
    dist.barrier()


def _tell_torchrun(line: str, trace: str) -> bool:
    """Write the error file of this rank; False without a torchrun.

    Whole or not at all, as torch's `record` does not: torchrun, which reads the
    file when a rank ends, dies of one that is half written.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None:
        return False
    about = {"py_callstack": trace, "timestamp": int(time.time())}
    message = {"message": line, "extraInfo": about}
    unfinished = Path(f"{file}.unfinished")
    unfinished.write_text(json.dumps({"message": message}))
    unfinished.replace(file)
    return True


def run(main: Callable[[], int | None]) -> NoReturn:
    """End the process with what `main()` returns, or 1 after a traceback.

    At once: Python's own end can abort in a thread of a C++ library. The group
    ends only after success: else it would wait for a rank that failed.
    """
    code: int | None = 1
    try:
        code = main()
        if not code:
            destroy_process_group()
    except Exception as error:
        traceback.print_exc()
        line = f"{type(error).__name__}: {error}"
        _tell_torchrun(line, traceback.format_exc())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)
