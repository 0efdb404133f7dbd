"""What runs in the process of each rank that `launch.run_ranks` starts."""

import faulthandler
import multiprocessing.util
import os
import pickle
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from miniddp.process import destroy_process_group, init_process_group


def main(home: Path, environment: dict[str, str], backend: str | None) -> None:
    """Call fn as rank `home.name`; leave its `value` or `traceback` there."""
    os.setsid()
    os.environ.clear()
    os.environ |= {**environment, "RANK": home.name, "LOCAL_RANK": home.name}
    _keep_output(home / "output")
    _answer_sigusr1(home / "stack")
    watch = threading.Thread(target=_end_with_parent, args=(home,), daemon=True)
    watch.start()
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    code = 0
    try:
        fn, args = pickle.loads((home.parent / "call").read_bytes())
        _fill_main(fn)
        if backend is not None:
            init_process_group(backend)
            dist.barrier()  # who left at once would break others' connecting
        value = fn(int(home.name), *args)
        destroy_process_group()
        data = dump(value, f"the value that rank {home.name} returned")
        (home / "value").write_bytes(data)
    except BaseException as error:
        code = 1
        frames = error.__traceback__ and error.__traceback__.tb_next
        text = "".join(traceback.format_exception(type(error), error, frames))
        (home / "traceback").write_text(text, encoding="utf-8")
    sys.stdout.flush()
    multiprocessing.util._run_finalizers(0)  # type: ignore[attr-defined]
    os._exit(code)  # now: a thread or child that fn forgot must not keep it


def _keep_output(file: Path) -> None:
    """Send what this process and its children print to a file, in order."""
    with file.open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", 1, "utf-8", "replace", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, "utf-8", "replace", closefd=False)


def _answer_sigusr1(file: Path) -> None:
    """Write the main thread's stack to a file when the parent asks for it."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file.open("w"), all_threads=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


def _end_with_parent(home: Path) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    shutil.rmtree(home.parent, ignore_errors=True)
    os.killpg(os.getpid(), signal.SIGKILL)


def _fill_main(fn: Callable[..., Any]) -> None:
    """Let torch pickle the classes that a function of `__main__` uses."""
    if getattr(fn, "__module__", None) == "__main__":
        main = vars(sys.modules["__main__"])
        for name, value in getattr(fn, "__globals__", {}).items():
            if not name.startswith("__"):
                main[name] = value


def dump(value: object, what: str) -> bytes:
    """Pickle `value`; `TypeError` naming `what` if that cannot be done."""
    import cloudpickle  # here: the rest of the package needs torch alone

    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise TypeError(f"{what} cannot be pickled: {error}") from error


def load(home: Path) -> Any:
    """The value of rank `home.name`; `TypeError` if it cannot be unpickled."""
    try:
        return pickle.loads((home / "value").read_bytes())
    except Exception as error:
        what = f"the value that rank {home.name} returned"
        raise TypeError(f"{what} cannot be unpickled: {error}") from error


def read(file: Path) -> str:
    """The text of a file that a rank may have written, else nothing."""
    if not file.exists():
        return ""
    return file.read_text(encoding="utf-8", errors="replace")
