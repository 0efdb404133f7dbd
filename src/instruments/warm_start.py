"""torchrun, forked with everything imported: a job of tests then starts in a second.

Launcher, agent, restarts, signals and parents are torchrun's own. What is saved are the
imports that `python` would execute for itself and for each rank of `finetune`.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets  # noqa: F401  this and the next ones for the ranks
import torch.distributed.run as torchrun
import transformers.models.llama.modeling_llama  # noqa: F401
from torch.distributed.elastic.multiprocessing.subprocess_handler import (
    subprocess_handler,
)

import finetune.train  # noqa: F401

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # by torchrun


class Forked:
    """What torchrun uses of a `Popen`, for a process that was forked."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.returncode: int | None = None
        # torchrun's handlers raise: within `os.fork`, logging would keep its lock.
        mask_before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                work()
            finally:
                os._exit(70)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask_before)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (timeout or 1e9)
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a rank", timeout or 0)
            time.sleep(0.01)
        return code


def rank(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """`python arguments`: it finds no signal handlers and no open files."""
    os.setsid()
    os.closerange(3, 1024)
    forget_handlers()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = list(arguments)
    code = exit_code(lambda: runpy.run_path(arguments[0], run_name="__main__"))
    sys.stdout.flush()
    os._exit(code)


def exit_code(program: Callable[[], Any]) -> int:
    """Of a Python that executes this; what it would say is printed."""
    try:
        program()
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr, flush=True)
            return 1
        return error.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def forget_handlers() -> None:
    for number in HANDLED:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def launch(
    arguments: Sequence[str], environment: Mapping[str, str], output: Path, warm: bool
) -> None:
    """`torchrun arguments`, in this process, which was forked for it."""
    os.setsid()
    forget_handlers()
    multiprocessing.set_start_method(None, force=True)  # as in a Python of its own
    os.environ.clear()
    os.environ.update(environment)
    with output.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if not warm:
        program = [sys.executable, "-m", "torch.distributed.run", *arguments]
        os.execve(sys.executable, program, dict(environment))

    def start(
        self: Any, command: Sequence[str], variables: Mapping[str, str]
    ) -> Forked:
        program = command[command.index("-u") + 1 :]  # after the interpreter
        return Forked(lambda: rank(program, variables))

    subprocess_handler.SubprocessHandler._popen = start  # type: ignore[assignment,method-assign]
    torchrun.main(list(arguments))
