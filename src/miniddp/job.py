"""A job of many ranks as one command: one log, one error, one exit code.

A rank that fails alone leaves, and the others wait for it in vain. So work
that may fail goes through `succeed_together`.
"""

import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

import torch.distributed as dist

from miniddp.process import destroy_process_group, init_process_group

T = TypeVar("T")
Error = type[Exception]


def start() -> None:
    """Start torchrun's process group, or one of one rank. Only rank 0 logs."""
    rank = int(os.environ.get("RANK", 0))
    if rank != 0:
        os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    level = logging.ERROR if rank else logging.INFO
    logging.basicConfig(level=level, format="%(message)s")
    if "RANK" in os.environ:
        init_process_group()
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


def say_once(line: str) -> None:
    """Show an error that every rank has, as the last line of the job.

    torchrun ends its own output with the error file of the rank that failed
    first, and stops the others: so the others leave after rank 0.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if dist.get_rank() != 0:
        dist.barrier()
        time.sleep(1)
        return
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        about = {"py_callstack": line, "timestamp": int(time.time())}
        message = {"message": line, "extraInfo": about}
        Path(file).write_text(json.dumps({"message": message}))
    else:
        print(line, file=sys.stderr)
    dist.barrier()


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
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)
