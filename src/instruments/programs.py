"""Programs, started on this machine as a reader starts them, and what they print."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

TORCHRUN = ("-m", "torch.distributed.run")
"""torchrun as Python's arguments: the torchrun of this Python, whatever PATH says."""

LAUNCHER_SETS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def start_python(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """`python arguments`, with `environment` beside this process's own.

    It does not inherit what a launcher sets. It computes with one thread, as each rank
    of a torchrun does.
    """
    inherited = {
        name: value for name, value in os.environ.items() if name not in LAUNCHER_SETS
    }
    return subprocess.Popen(
        [sys.executable, *arguments],
        env={**inherited, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_python(*arguments: str, **environment: str) -> str:
    """What a program started by `start_python` prints.

    Raises `RuntimeError` with its errors if it fails, and `subprocess.TimeoutExpired`
    after ten minutes.
    """
    with start_python(*arguments, **environment) as program:
        try:
            printed, errors = program.communicate(timeout=600)
        finally:
            program.kill()
    if program.returncode:
        raise RuntimeError(f"python {' '.join(arguments)} failed:\n{errors}")
    return printed


def run_torchrun(ranks: int, program: str, **environment: str) -> str:
    """What all ranks print under `torchrun --standalone --nproc_per_node=ranks`."""
    options = ("--standalone", f"--nproc_per_node={ranks}")
    return run_python(*TORCHRUN, *options, program, **environment)


def run_launchers(*launchers: Sequence[str]) -> list[str]:
    """What each rank prints when a torchrun starts on each node, all at once.

    Takes the arguments of each torchrun. The texts stand in the order of the ranks, so
    each has to begin with its rank. A rank that prints nothing is left out. Raises
    `RuntimeError` with the launcher's errors if one fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        started: list[subprocess.Popen[str]] = []
        try:
            for number, arguments in enumerate(launchers):
                logs = ("--redirects=3", f"--log-dir={folder}/{number}")
                command = [sys.executable, *TORCHRUN, *logs, *arguments]
                started.append(
                    subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
                )
            for launcher in started:
                errors = launcher.communicate(timeout=240)[1]
                if launcher.returncode:
                    raise RuntimeError(f"a launcher failed:\n{errors}")
        finally:
            for launcher in started:
                launcher.kill()
        texts = [path.read_text() for path in Path(folder).rglob("stdout.log")]
        return sorted(filter(None, texts), key=_first_number)


def _first_number(text: str) -> int:
    found = re.search(r"\d+", text)
    if found is None:
        raise ValueError(f"no rank stands in {text!r}")
    return int(found[0])


def free_port() -> int:
    """A TCP port that nobody on this machine listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def wait_for_listener(port: int) -> None:
    """Returns when somebody on this machine listens at a TCP port."""
    while True:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", port), 1),
        ):
            return
        time.sleep(0.05)


def step_losses(text: str) -> dict[int, float]:
    """The losses that a stage prints, by step."""
    found = re.findall(r"step +(\d+) +loss (\S+)", text)
    return {int(step): float(loss) for step, loss in found}


def held_out_loss(text: str) -> float:
    """The loss on the held-out text that a stage prints at its end.

    Raises `ValueError` if there is none.
    """
    found = re.search(r"held-out loss (\S+)", text)
    if found is None:
        raise ValueError(f"no held-out loss stands in {text!r}")
    return float(found[1])


def run_edited_stage(rank: int, file: str, old: str, new: str, steps: int) -> None:
    """A program of `stages/` in the group that this rank is in, with `new` for `old`.

    Raises `ValueError` if `old` does not stand in it exactly once.
    """
    source = Path("stages", file).read_text(encoding="utf-8")
    if source.count(old) != 1:
        raise ValueError(f"{file} has {source.count(old)} times {old!r}, expected once")
    os.environ["STEPS"] = str(steps)
    torch.set_num_threads(1)
    names: dict[str, Any] = {"__name__": "stage"}
    exec(source.replace(old, new), names)
    names["init_process_group"] = lambda: None
    names["destroy_process_group"] = lambda: None
    names["main"]()
