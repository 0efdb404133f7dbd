"""What runs in the process of each rank that `launch.run_ranks` starts."""

import faulthandler
import functools
import io
import multiprocessing.util
import os
import pickle
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Mapping
from multiprocessing import connection
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from miniddp.process import init_process_group


def main(folder: Path, rank: int, environment: Mapping[str, str], backend: str | None) -> None:
    """Call the function in `folder / "call"`; leave `<rank>.value` or `<rank>.traceback` there."""
    if hasattr(os, "setsid"):
        os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)
    _keep_output(folder / f"{rank}.output")
    faulthandler.enable()
    if hasattr(faulthandler, "register"):
        stack_file = os.open(folder / f"{rank}.stack", os.O_WRONLY | os.O_CREAT)
        faulthandler.register(signal.SIGUSR1, stack_file, all_threads=False)
    torch.set_num_threads(max(1, _cpu_count() // int(environment["LOCAL_WORLD_SIZE"])))
    try:
        fn, args = pickle.loads((folder / "call").read_bytes())
        _fill_main(fn)
        if backend is not None:
            init_process_group(backend)
            dist.barrier()  # a rank that returned at once would break the others' connecting
        value = fn(rank, *args)
        if dist.is_initialized():
            dist.destroy_process_group()
        _write(folder / f"{rank}.value", dump(value, f"the value that rank {rank} returned"))
    except BaseException as error:
        frames = error.__traceback__ and error.__traceback__.tb_next
        text = "".join(traceback.format_exception(type(error), error, frames))
        _write(folder / f"{rank}.traceback", text.encode())
    sys.stdout.flush()
    multiprocessing.util._run_finalizers(0)  # type: ignore[attr-defined]  # frees its semaphores
    os._exit(0)  # at once: a thread or a child that fn forgot must not keep the rank


def _fill_main(fn: Callable[..., Any]) -> None:
    """Put what a function of `__main__` uses there, so that torch can pickle its classes too."""
    if getattr(fn, "__module__", None) == "__main__":
        names = getattr(fn, "__globals__", {}).items()
        main = vars(sys.modules["__main__"])
        main.update({name: value for name, value in names if not name.startswith("__")})


def dump(value: object, what: str) -> bytes:
    """Pickle `value`; `TypeError` naming `what` if that cannot be done."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(value)
    except Exception as error:
        raise TypeError(f"{what} cannot be pickled: {error}") from error
    return buffer.getvalue()


def load(file: Path) -> Any:
    """Unpickle a rank's value; `TypeError` naming the rank if that cannot be done."""
    try:
        return pickle.loads(file.read_bytes())
    except Exception as error:
        raise TypeError(
            f"the value that rank {file.stem} returned cannot be unpickled: {error}"
        ) from error


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, which sends by value what `__main__` defines, extended to other modules that a
    new process could not import."""

    def reducer_override(self, value: Any) -> Any:
        module = sys.modules.get(str(getattr(value, "__module__", None)))
        if module is not None and not _is_importable(module):
            cloudpickle.register_pickle_by_value(module)
        return super().reducer_override(value)


@functools.cache
def _is_importable(module: types.ModuleType) -> bool:
    """Whether an entry of `sys.path` and the module's name lead to the module's file.

    Compiled modules count as importable: their classes cannot be sent by value.
    """
    file = Path(getattr(module, "__file__", None) or "").resolve()
    if module.__name__ == "__main__" or file.suffix != ".py":
        return True
    path = file.parent if file.stem == "__init__" else file.with_suffix("")
    parts = tuple(module.__name__.split("."))
    roots = {Path(entry).resolve() for entry in sys.path}
    return path.parts[-len(parts) :] == parts and path.parents[len(parts) - 1] in roots


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    if hasattr(os, "killpg"):
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _keep_output(file: Path) -> None:
    """Send all that this process and its children print to a file, in the order it is printed."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(1, "w", 1, "utf-8", "replace", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, "utf-8", "replace", closefd=False)


def _write(file: Path, data: bytes) -> None:
    """Write all or nothing: a rank that is killed meanwhile leaves no half file."""
    part = file.with_suffix(".part")
    part.write_bytes(data)
    part.replace(file)


def _cpu_count() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
