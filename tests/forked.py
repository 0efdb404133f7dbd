"""A Python that starts at once: each program is a fork of one process that has imported torch.

The folder `fast_bin()` holds `python`, `python3` and `torchrun`. They stand for the real ones:
arguments, environment, working directory, open files, signals and exit status are those of the
program, and whatever it starts with `sys.executable` is forked as well. Two seconds of processor
time are saved for each process, which is most of what short programs take.

What cannot be handed to a fork (options of the interpreter, TORCH_LOGS) starts the real Python.
"""

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coverage
import torch

IMPORTED = ("torch._dynamo", "torch.distributed.launcher.api", "torch.utils.data", "numpy",
            "datasets", "safetensors.torch", "transformers.models.llama.modeling_llama",
            "cloudpickle", "pytest")  # fmt: skip
READ_AT_START = ("TORCH_LOGS", "TORCH_CPP_LOG_LEVEL")
CLIENT = """#!{python} -IS
import json, os, signal, socket, sys

with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    files = [int(name) for name in os.listdir("/proc/self/fd")]
    files = [n for n in files if n != server.fileno() and os.path.exists(f"/proc/self/fd/{{n}}")]
    told = json.dumps([sys.argv, os.getcwd(), dict(os.environ), files]).encode()
    socket.send_fds(server, [b"%9d" % len(told)], files)
    server.sendall(told)
    answers = server.makefile()
    process = int(answers.readline())

    def hand_on(number, _):
        try:
            os.kill(process, number)
        except ProcessLookupError:
            pass  # it has ended, and its exit code is under way

    for name in ("TERM", "INT", "HUP", "USR1", "USR2", "QUIT"):
        signal.signal(signal.Signals["SIG" + name], hand_on)
    code = int(answers.readline())
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@functools.cache
def fast_bin() -> Path:
    """The folder with the commands: the real ones where there are GPUs, which no fork may share."""
    if torch.cuda.is_available() or sys.platform != "linux":
        return Path(sys.executable).parent
    until_exit = contextlib.ExitStack()
    atexit.register(until_exit.close)
    return until_exit.enter_context(serving())


@contextlib.contextmanager
def serving() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fork-") as name:  # short: it holds a socket
        folder, address = Path(name) / "bin", f"{name}/socket"
        folder.mkdir()
        for command in ("python", "python3", "torchrun"):
            (folder / command).write_text(CLIENT.format(python=sys.executable, address=address))
            (folder / command).chmod(0o755)
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        environment.pop("COVERAGE_PROCESS_CONFIG", None)  # in forks alone
        server = subprocess.Popen(
            [sys.executable, __file__, address, folder / "python"],
            env={**environment, "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert server.stdout
        with server:  # ends when this process has closed its end of stdin, or has ended
            assert server.stdout.readline() == b"ready\n"
            yield folder


# In the server


def serve(address: str) -> tuple[list[Any], list[int]]:
    """Wait for programs. Returns in the process of each: what it was told, and its files."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who wait
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        print("ready", flush=True)
        while listener in select.select([listener, sys.stdin], [], [])[0]:
            client, _ = listener.accept()
            if os.fork() == 0:
                break
            client.close()
        else:
            os._exit(0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    length, files, _, _ = socket.recv_fds(client, 9, 250)
    told = client.makefile("rb").read(int(length))
    process = os.fork()
    if process == 0:
        client.close()
        return json.loads(told), files
    for file in files:
        os.close(file)
    wait(process, client)
    os._exit(0)


def wait(process: int, client: socket.socket) -> None:
    """Tell the client how the process ends. A client that was killed takes it along."""
    client.sendall(b"%d\n" % process)
    ended = os.pidfd_open(process)
    if client in select.select([client, ended], [], [])[0]:
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    with contextlib.suppress(BrokenPipeError):
        client.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))


# In the process of a program


def take(files: list[int], numbers: list[int]) -> None:
    """The files of the client under the numbers that they have there."""
    high = max([*files, *numbers]) + 1
    copies = [fcntl.fcntl(file, fcntl.F_DUPFD, high) for file in files]
    os.closerange(0, high)
    for copy, number in zip(copies, numbers, strict=True):
        os.dup2(copy, number)
        os.close(copy)


def run(rest: list[str]) -> None:
    """What the interpreter does with its arguments."""
    if rest[0] == "-u" or "PYTHONUNBUFFERED" in os.environ:
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    while rest[0] in ("-u", "-B"):
        rest = rest[1:]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(main)["__builtins__"] = __builtins__
    if rest[0] == "-m":
        sys.argv = ["-m", *rest[2:]]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(rest[1])  # type: ignore[attr-defined]
        return
    if rest[0] == "-c":
        sys.argv = ["-c", *rest[2:]]
        sys.path.insert(0, "")
        exec(compile(rest[1], "<string>", "exec"), vars(main))
        return
    sys.argv = rest
    path = Path(rest[0])
    if not path.is_file():
        sys.exit(f"python: can't open file {rest[0]!r}")
    sys.path.insert(0, str(path.resolve().parent))
    main.__file__ = str(path.absolute())
    exec(compile(path.read_bytes(), main.__file__, "exec"), vars(main))


def status_of(arguments: list[str]) -> int:
    try:
        run(arguments)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        here = error.__traceback__.tb_next.tb_next  # type: ignore[union-attr]
        traceback.print_exception(error.with_traceback(here))
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        return 1
    return 0


def main() -> None:
    address, python = sys.argv[1:]
    real, libraries = sys.executable, sys.path[1:]
    for name in IMPORTED:
        importlib.import_module(name)
    assert "miniddp" not in sys.modules
    assert threading.active_count() == 1
    gc.freeze()
    (argv, folder, environment, numbers), files = serve(address)
    take(files, numbers)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if Path(argv[0]).name == "torchrun":
        argv[1:1] = ["-m", "torch.distributed.run"]
    program = next(argument for argument in argv[1:] if argument not in ("-u", "-B"))
    known = program in ("-c", "-m") or not program.startswith("-")
    if not known or any(key in environment for key in READ_AT_START):
        os.execv(real, [real, *argv[1:]])
    sys.executable = python
    multiprocessing.set_executable(python)
    search = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*filter(None, search), *libraries]
    coverage.process_startup()
    torch.distributed.set_debug_level_from_env()
    if threads := environment.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    code = status_of(argv[1:])
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError):  # closed by the program
            stream.flush()
    os._exit(code)  # to take the modules apart takes longer than many a program


if __name__ == "__main__":
    main()
