"""A forked program behaves like one that was started."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ..forked import CLIENT, fast_bin

SCRIPT = """
import os, sys, threading, torch
print(sys.argv[1:], __name__, __file__, sys.stdin.read())
print(os.environ["GIVEN"], torch.get_num_threads())
print("late", file=sys.stderr)
threading.Thread(target=lambda: print("thread")).start()
"""
GROUP = """
import torch.distributed as dist
dist.init_process_group("gloo")
print(f"rank {dist.get_rank()} of {dist.get_world_size()}\\n", end="")
dist.barrier()
dist.destroy_process_group()
"""
RANKS = "from miniddp import run_ranks; print(run_ranks(lambda rank: rank, 2))"
SLEEP = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"


@pytest.fixture(params=["real", "forked"])
def bin(request: pytest.FixtureRequest) -> Path:
    return fast_bin() if request.param == "forked" else Path(sys.executable).parent


def run(*command: object, **options) -> tuple[int, str, str]:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, **options)
    return done.returncode, done.stdout, done.stderr


def test_arguments_files_environment_and_folder(bin: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    given = {**os.environ, "GIVEN": "here", "OMP_NUM_THREADS": "1"}
    assert run(
        bin / "python", "-u", "script.py", "--a", "b", cwd=tmp_path, env=given, input="in"
    ) == (0, f"['--a', 'b'] __main__ {tmp_path}/script.py in\nhere 1\nthread\n", "late\n")


@pytest.mark.parametrize(
    ("text", "code", "last"),
    [
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('no')", 1, "no"),
        ("import sys; sys.stdout.close()", 0, ""),
        ("1 / 0", 1, "ZeroDivisionError: division by zero"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("raise KeyboardInterrupt", -2, "KeyboardInterrupt"),
    ],
)
def test_ends(bin: Path, text: str, code: int, last: str) -> None:
    status, _, errors = run(bin / "python", "-c", text)
    assert (status, errors.strip().split("\n")[-1]) == (code, last)
    assert "forked.py" not in errors


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_it(bin: Path, how: signal.Signals) -> None:
    with subprocess.Popen([bin / "python", "-c", SLEEP], stdout=subprocess.PIPE, text=True) as it:
        assert it.stdout
        process = int(it.stdout.readline())
        it.send_signal(how)
        assert it.wait(20) == -how
        assert it.stdout.read() == "", "open until the program itself has ended"
    while os.path.exists(f"/proc/{process}"):  # else the test runs into its time limit
        time.sleep(0.02)


def test_a_signal_after_its_end_changes_nothing(tmp_path: Path) -> None:
    address = str(tmp_path / "socket")
    with socket.create_server(address, family=socket.AF_UNIX) as server:
        client = CLIENT.format(python=sys.executable, address=address)
        command = [sys.executable, "-IS", "-c", client]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as it:
            connection, _ = server.accept()
            for file in socket.recv_fds(connection, 9, 250)[1]:
                os.close(file)  # else its stderr stays open
            gone = subprocess.Popen(["true"])
            gone.wait()
            connection.sendall(b"%d\n" % gone.pid)
            status = Path(f"/proc/{it.pid}/status")
            while not catches(status, signal.SIGTERM) or not catches(status, signal.SIGQUIT):
                time.sleep(0.02)
            it.send_signal(signal.SIGTERM)
            time.sleep(0.2)
            connection.sendall(b"3\n")
            assert it.wait(20) == 3
            assert it.stderr
            assert it.stderr.read() == ""


def catches(status: Path, number: int) -> bool:
    """Whether a process has a handler for this signal, by /proc/PID/status."""
    line = next(line for line in status.read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


def test_what_it_starts(bin: Path, tmp_path: Path) -> None:
    assert run(bin / "python", "-c", RANKS)[:2] == (0, "[0, 1]\n")
    (tmp_path / "group.py").write_text(GROUP)
    code, out, errors = run(
        bin / "torchrun", "--standalone", "--nproc_per_node=2", tmp_path / "group.py"
    )
    assert (code, sorted(out.splitlines())) == (0, ["rank 0 of 2", "rank 1 of 2"]), errors


def test_options_of_the_interpreter(bin: Path) -> None:
    assert run(bin / "python", "-W", "error", "-c", "import warnings; warnings.warn('x')")[0] == 1
