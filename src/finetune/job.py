"""A job of many ranks as one command: one log, one error, one exit code.

A rank that fails alone leaves, and the others wait for it in vain. So work
that may fail goes through `succeed_together`.
"""

import hashlib
import logging
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

import finetune
import miniddp
from finetune.parent import end_with_torchrun
from miniddp.process import init_process_group

T = TypeVar("T")
SHOWN = 100  # characters of a value


def start(timeout: int, backend: str | None = None) -> None:
    """Start torchrun's process group, or one of one rank. Only rank 0 logs.

    A collective fails after `timeout` seconds. If torchrun is killed, Linux
    kills the ranks: nobody would stop or restart them. Raises `ValueError` if
    the ranks want different backends.
    """
    rank = int(os.environ.get("RANK", 0))
    if rank != 0:
        os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    level = logging.ERROR if rank else logging.INFO
    logging.basicConfig(level=level, format="%(message)s")
    end_with_torchrun()
    limit = timedelta(seconds=timeout)
    if "RANK" in os.environ:
        init_process_group(backend, limit)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        init_process_group(backend, limit, store=store, rank=0, world_size=1)


def succeed_together(
    work: Callable[[], T], error_type: type[Exception], context: str = ""
) -> T:
    """This rank's `work()`; if it raises on any rank, an `error_type` on all.

    The message is one line: `context`, the lowest rank that failed unless all
    did alike, and its error.
    """
    problem: Exception | None = None
    try:
        result = work()
    except Exception as error:
        problem = error
    line = one_line(problem) if problem else ""
    line_by_rank = [line] * dist.get_world_size()
    dist.all_gather_object(line_by_rank, line)
    for rank, line in enumerate(line_by_rank):
        if line:
            all_alike = set(line_by_rank) == {line}
            who = "" if all_alike else f"rank {rank}: "
            raise error_type(context + who + line) from problem
    return result


def one_line(error: Exception) -> str:
    """What an error says, without the number and the file of an `OSError`."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror
    return " ".join(text.split()) or type(error).__name__


def check_alike(facts: Mapping[str, object], error_type: type[Exception]) -> None:
    """Raise an `error_type` on every rank for a fact that differs."""
    facts_by_rank = [facts] * dist.get_world_size()
    dist.all_gather_object(facts_by_rank, facts)
    for name, expected in facts_by_rank[0].items():
        for rank, facts_of_rank in enumerate(facts_by_rank):
            found = facts_of_rank.get(name)
            if found != expected:
                here = str(expected)[:SHOWN]
                there = str(found)[:SHOWN]
                raise error_type(
                    f"{name} is {here} on rank 0, and {there} on rank {rank}"
                )


def versions() -> dict[str, str]:
    """Of what decides a step: two libraries, and the code of two packages."""
    facts = {name: version(name) for name in ("torch", "transformers")}
    for package in (finetune, miniddp):
        folder = Path(str(package.__file__)).parent
        facts[f"SHA-256 of {package.__name__}'s code"] = digest_of_code(folder)
    return facts


def digest_of_code(folder: Path) -> str:
    """The first 16 digits of a SHA-256 over every Python file in a folder."""
    sha = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        sha.update(file.relative_to(folder).as_posix().encode())
        sha.update(file.read_bytes())
    return sha.hexdigest()[:16]


class Stopped(Exception):  # noqa: N818
    """The job was asked to stop by a signal. Started again, it goes on.

    Its arguments: the steps taken, and the path of the last checkpoint.
    """


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Within it, SIGTERM and SIGINT do nothing but add to the list."""
    requests: list[int] = []
    handlers_before = {
        number: signal.signal(number, lambda number, _: requests.append(number))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield requests
    finally:
        for number, handler in handlers_before.items():
            signal.signal(number, handler)
