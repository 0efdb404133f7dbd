"""A job of many ranks as one command: one log, one error, one exit code."""

import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from miniddp.process import destroy_process_group, get, init_process_group


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


def say_once(line: str) -> None:
    """Show an error that every rank has, as the last line of the job.

    torchrun ends its own output with the error file of the rank that failed
    first, and stops the others: so the others leave after rank 0.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if get("rank") != 0:
        dist.barrier()
        time.sleep(1)
        return
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None:
        print(line, file=sys.stderr)
    else:
        about = {"py_callstack": line, "timestamp": int(time.time())}
        message = {"message": line, "extraInfo": about}
        Path(file).write_text(json.dumps({"message": message}))
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
