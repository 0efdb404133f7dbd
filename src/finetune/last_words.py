"""The end of a job: its error is one line, once, the last on the screen.

torchrun ends its own output with the error file of the rank that failed first.
torch's `record` writes that file, but in place: torchrun, which reads it when a
rank ends, dies of one that is half written. Here it is whole or not there.
"""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

LONGEST = 1000  # characters of an error


def error_before_restart() -> str | None:
    """The error that the ranks left with before torchrun restarted them."""
    file = _file_of_all_restarts()
    return file.read_text() if file and file.exists() else None


def _file_of_all_restarts() -> Path | None:
    """A file of this torchrun; each restart has a folder of its own in it."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(file).parents[2] / "last_words" if file else None


def say_once(line: str) -> None:
    """Show an error that every rank has, as the last line of the job.

    torchrun stops all ranks when one has left, so the others leave after rank
    0. A restart mends nothing: see `error_before_restart`.
    """
    words = " ".join(line.split())[:LONGEST]
    line = words.encode(errors="backslashreplace").decode()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    kept = _file_of_all_restarts()
    if kept and not kept.exists():  # else a rank may be reading it
        kept.write_text(line)
    if dist.get_rank() != 0:
        dist.barrier()
        time.sleep(1)
        return
    say(line)
    dist.barrier()


def say(line: str) -> None:
    """Show an error of this rank: torchrun does, or else it is printed."""
    if not _tell_torchrun(line, line):
        print(line, file=sys.stderr)


def _tell_torchrun(line: str, trace: str) -> bool:
    """Write the error file of this rank; False without a torchrun."""
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
        if not code and dist.is_initialized():
            dist.destroy_process_group()
    except Exception as error:
        traceback.print_exc()
        line = f"{type(error).__name__}: {error}"
        _tell_torchrun(line, traceback.format_exc())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)
