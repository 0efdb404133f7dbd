"""run_ranks: what comes back, what goes wrong, and that nothing stays behind."""

import contextlib
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from miniddp.launch import RankResults, RanksFailed, RanksTimedOut, run_ranks
from miniddp.launch import ranks as ranks_of_launch
from miniddp.process import device, init_process_group

from . import ranks
from .ranks import run


class Point:
    def __init__(self, x: float) -> None:
        self.x = x


def say_pid() -> None:
    print(f"pid {os.getpid()}", flush=True)


def pids(outputs: list[str]) -> list[int]:
    found = [int(pid) for text in outputs for pid in re.findall(r"pid (\d+)", text)]
    assert found, "no rank has said its process id"
    return found


def assert_gone(process_ids: list[int]) -> None:
    last_moment = time.monotonic() + 10
    while (
        left := [pid for pid in process_ids if is_alive(pid)]
    ) and time.monotonic() < last_moment:
        time.sleep(0.05)
    assert not left


def is_alive(pid: int) -> bool:
    """Not ended: a zombie has, and only waits for the fork server, which takes a while to end."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    return not Path("/proc/self/stat").exists()


# What comes back


def facts(rank: int, scale: float, point: Point) -> dict[str, Any]:
    total = torch.tensor([float(rank + 1)], device=device())
    dist.all_reduce(total)
    print(f"hello from rank {rank}")
    os.system("echo from a child process")
    os.write(2, b"from C\n")
    print("to stderr", file=sys.stderr)
    print("x" * 300_000)
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SET_LATER"]
    dataset = torch.utils.data.TensorDataset(torch.arange(8))
    loader = torch.utils.data.DataLoader(dataset, batch_size=4, num_workers=2)
    threading.Thread(target=time.sleep, args=(600,)).start()
    return {
        "total": total.item(),
        "point": Point(point.x * scale),
        "environment": {name: os.environ.get(name) for name in names},
        "threads": torch.get_num_threads(),
        "loaded": [batch.tolist() for (batch,) in loader],
        "backend": dist.get_backend(),
    }


@pytest.fixture(scope="module")
def results() -> RankResults:
    run(say_pid_of, 1)  # the fork server runs: what is set now must still reach the ranks
    os.environ["SET_LATER"] = "yes"
    try:
        return run(facts, 2, 3.0, Point(2.0), default_device=False)
    finally:
        del os.environ["SET_LATER"]


def say_pid_of(rank: int) -> None:
    say_pid()


def test_ranks_form_a_group_and_return_in_order(results: RankResults) -> None:
    assert isinstance(results, list)
    assert [result["total"] for result in results] == [3.0, 3.0]
    assert [result["backend"] for result in results] == [ranks.backend] * 2
    for rank, result in enumerate(results):
        assert result["environment"] == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "SET_LATER": "yes",
        }


def test_ranks_share_the_cores(results: RankResults) -> None:
    (alone,) = run(lambda rank: torch.get_num_threads(), 1)
    assert [result["threads"] for result in results] == [max(1, alone // 2)] * 2


def test_objects_travel_both_ways(results: RankResults) -> None:
    assert all(type(result["point"]) is Point and result["point"].x == 6.0 for result in results)


def test_data_loader_workers_run_inside_a_rank(results: RankResults) -> None:
    assert [result["loaded"] for result in results] == [[[0, 1, 2, 3], [4, 5, 6, 7]]] * 2


def test_output_is_kept_whole_and_in_order(results: RankResults) -> None:
    for rank, text in enumerate(results.outputs):
        lines = [f"hello from rank {rank}", "from a child process", "from C", "to stderr"]
        assert text.splitlines() == [*lines, "x" * 300_000]


def test_without_backend_the_function_starts_the_group() -> None:
    def start(rank: int) -> tuple[bool, int]:
        before = dist.is_initialized()
        init_process_group(ranks.backend)
        dist.barrier()  # gloo fails on a rank whose peer leaves while it still connects
        return before, dist.get_rank()

    assert run(start, 2, backend=None) == [(False, 0), (False, 1)]


def test_two_threads_may_launch_at_once() -> None:
    main, collected = sys.modules["__main__"], {}

    def collect(world_size: int) -> None:
        collected[world_size] = run(lambda rank: rank, world_size)

    threads = [threading.Thread(target=collect, args=(n,)) for n in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert collected == {1: [0], 2: [0, 1]}
    assert sys.modules["__main__"] is main


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors in /proc")
def test_no_descriptor_and_no_file_stays_open() -> None:
    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    run(say_pid_of, 1)
    before = count()
    for _ in range(3):
        run(say_pid_of, 2)
    last_moment = time.monotonic() + 10  # the store's own thread closes its connections
    while count() > before and time.monotonic() < last_moment:
        time.sleep(0.05)
    assert count() <= before


# What goes wrong


@pytest.mark.parametrize("world_size", [0, -1, 2.0, "2", None, True])
def test_bad_world_size(world_size: Any) -> None:
    with pytest.raises(ValueError, match="world_size must be an integer of at least 1"):
        run_ranks(say_pid_of, world_size)


@pytest.mark.parametrize("timeout", [0, -1.0, math.nan, math.inf, None, "60"])
def test_bad_timeout(timeout: Any) -> None:
    with pytest.raises(ValueError, match="timeout must be a positive number of seconds, not"):
        run_ranks(say_pid_of, 1, timeout=timeout)


def fails_on_rank_1(rank: int, how: Callable[[], None]) -> None:
    say_pid()
    if rank == 1:
        how()
    dist.barrier()


def raise_lookup_error() -> None:
    raise LookupError("no such shard")


def test_a_rank_raises_while_the_others_wait() -> None:
    with pytest.raises(RanksFailed) as caught:
        run(fails_on_rank_1, 3, raise_lookup_error)
    error = caught.value
    assert str(error).startswith("rank 1 of 3 failed, then rank")
    assert "LookupError: no such shard" in str(error)
    assert next(iter(error.tracebacks)) == 1
    assert error.tracebacks[1].endswith("LookupError: no such shard\n")
    assert "worker.py" not in error.tracebacks[1]
    assert all("barrier" in error.tracebacks[rank] for rank in (0, 2))
    assert_gone(pids(error.outputs))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (lambda: os._exit(3), "rank 1: left without returning (exit code 3)"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "rank 1: was killed by SIGKILL"),
        (lambda: sys.exit(0), "SystemExit: 0"),
    ],
    ids=["exit code", "signal", "sys.exit"],
)
def test_a_rank_dies_while_the_others_wait(how: Callable[[], None], said: str) -> None:
    with pytest.raises(RanksFailed) as caught:
        run(fails_on_rank_1, 2, how)
    assert str(caught.value).startswith("rank 1 of 2 failed")
    assert said in str(caught.value)
    assert_gone(pids(caught.value.outputs))


def raise_late() -> None:
    time.sleep(1)
    raise_lookup_error()


def abort_late() -> None:
    time.sleep(1)
    os.abort()


def abort_when_the_others_are_gone() -> None:
    """As NCCL's watchdog does, some tenths of a second after another rank has left."""
    try:
        dist.barrier()
    except RuntimeError:
        time.sleep(0.2)
        os.abort()


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def does(rank: int, deeds: list[Callable[[], None]]) -> None:
    deeds[rank]()


@pytest.mark.parametrize(
    ("deeds", "order"),
    [
        ([raise_lookup_error, abort_late], [0, 1]),
        ([abort_late, raise_lookup_error], [1, 0]),
        ([raise_late, kill], [1, 0]),
        ([kill, raise_late], [0, 1]),
        ([raise_late, raise_lookup_error], [1, 0]),
        ([abort_late, kill], [1, 0]),
        ([abort_when_the_others_are_gone, raise_lookup_error], [1, 0]),
        ([dist.barrier, kill], [1, 0]),
        ([kill, dist.barrier], [0, 1]),
        ([raise_late, abort_when_the_others_are_gone, kill], [2, 1, 0]),
    ],
)
def test_the_first_cause_comes_first(deeds: list[Callable[[], None]], order: list[int]) -> None:
    with pytest.raises(RanksFailed) as caught:
        run(does, len(deeds), deeds, backend="gloo")
    assert list(caught.value.tracebacks) == order
    assert str(caught.value).startswith(f"rank {order[0]} of {len(deeds)} failed, then rank")


@pytest.mark.parametrize(
    ("ended", "raised", "order"),
    [
        ({0: 5.00, 1: 5.01}, {0: 7, 1: 0}, [1, 0]),
        ({0: 5.00, 1: 5.20}, {0: 7, 1: 0}, [0, 1]),
        ({0: 5.00, 1: 5.01}, {0: 8, 1: 7}, [1, 0]),
        ({0: 5.00, 1: 5.01}, {0: 0, 1: 0}, [0, 1]),
        ({0: 5.0, 1: 6.0, 2: 7.0}, {0: 9, 1: 0, 2: 8}, [2, 1, 0]),
    ],
)
def test_order_of_causes(ended: dict[int, float], raised: dict[int, int], order: list[int]) -> None:
    """By the seconds at which ranks were seen to end, and the moments at which they raised."""
    assert ranks_of_launch._first_cause_first(ended, raised) == order


def test_a_rank_that_does_not_notice_a_failure_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_of_launch, "GRACE_SECONDS", 2.0)

    def loop_or_raise(rank: int) -> None:
        say_pid()
        print(f"pid {subprocess.Popen(['sleep', '600']).pid}", flush=True)
        dist.barrier()
        if rank == 0:
            raise_lookup_error()
        spin()

    def spin() -> None:
        while True:
            pass

    with pytest.raises(RanksFailed, match=r"rank 1 was in\n.* in spin\n") as caught:
        run(loop_or_raise, 2)
    assert list(caught.value.tracebacks) == [0]
    assert len(pids(caught.value.outputs)) == 4
    assert_gone(pids(caught.value.outputs))


def test_hanging_ranks_are_named_with_their_stack() -> None:
    def hang(rank: int) -> None:
        say_pid()
        if rank == 0:
            dist.recv(torch.zeros(1), src=1)
        if rank == 1:
            time.sleep(600)
        os.kill(os.getpid(), signal.SIGSTOP)

    def start(rank: int) -> None:
        if rank < 3:
            hang(rank)

    with pytest.raises(RanksTimedOut) as caught:
        run(start, 4, backend="gloo", default_device=False, timeout=5)
    error = caught.value
    assert str(error).startswith("ranks 0, 1, 2 of 4 did not end within 5 s (rank 3 had returned)")
    assert list(error.stacks) == [0, 1, 2]
    assert "in recv" in error.stacks[0]
    assert "in hang" in error.stacks[1]
    assert "could not be read" in error.stacks[2]
    assert "worker.py" not in str(error)
    assert_gone(pids(error.outputs))


def test_a_rank_that_blocks_the_signal_shows_no_other_stack() -> None:
    def hang(rank: int) -> None:
        if rank == 0:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        time.sleep(600)

    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        with pytest.raises(RanksTimedOut) as caught:
            run(hang, 2, backend=None, timeout=5)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert "could not be read" in caught.value.stacks[0]
    assert "in hang" in caught.value.stacks[1]


def test_a_value_that_cannot_be_pickled_names_its_rank() -> None:
    with pytest.raises(RanksFailed, match="TypeError: the value that rank 1 returned cannot be"):
        run(lambda rank: threading.Lock() if rank else None, 2)


def refuse() -> None:
    raise ValueError("not here")


class CannotBeRead:
    def __reduce__(self) -> Any:
        return refuse, ()


def test_a_value_that_cannot_be_unpickled_names_its_rank() -> None:
    with pytest.raises(TypeError, match="the value that rank 0 returned cannot be unpickled: not"):
        run(lambda rank: CannotBeRead(), 1)


def test_an_argument_that_cannot_be_pickled() -> None:
    with pytest.raises(TypeError, match="fn with its arguments cannot be pickled"):
        run(fails_on_rank_1, 1, threading.Lock())


# Programs that launch

UNGUARDED_PROGRAM = """
import os, time
from dataclasses import dataclass
import torch.distributed as dist
from miniddp.launch import run_ranks

print("program runs", flush=True)

@dataclass
class Number:
    value: int

def work(rank, number):
    everyone = [None, None]
    dist.all_gather_object(everyone, Number(number.value + rank))
    return everyone[1 - rank]

numbers = run_ranks(work, 2, Number(5))
print([number.value for number in numbers if type(number) is Number], flush=True)

def hang(rank, pipe):
    with open(pipe, "a") as file:
        file.write(f"pid {os.getpid()}\\n")
    time.sleep(600)

import sys
import tempfile
try:
    run_ranks(hang, 2, sys.argv[1] + "/first")
except KeyboardInterrupt:
    print("interrupted", flush=True)
run_ranks(hang, 2, sys.argv[1] + "/second")
"""


def wait_for_pids(file: Path) -> list[int]:
    last_moment = time.monotonic() + 120
    while not file.exists() or file.read_text().count("\n") < 2:
        assert time.monotonic() < last_moment, f"the ranks have not written {file}"
        time.sleep(0.05)
    return pids([file.read_text()])


def test_program_without_a_guarded_main_is_interrupted_then_killed(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(UNGUARDED_PROGRAM)
    folder = Path(tempfile.mkdtemp())  # short: a socket's path has 108 bytes at most
    program = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # nohup ignores it
    )
    try:
        ranks = wait_for_pids(tmp_path / "first")
        program.send_signal(signal.SIGINT)
        ranks_after = wait_for_pids(tmp_path / "second")
        assert_gone(ranks)
        assert all(map(is_alive, ranks_after))
    finally:
        program.kill()
    assert_gone(ranks_after)
    assert not list(folder.glob("miniddp-*"))
    shutil.rmtree(folder)
    output, _ = program.communicate(timeout=60)  # the fork server holds it until it leaves
    assert output == "program runs\n[6, 5]\ninterrupted\n"


def test_functions_of_a_notebook(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="needs the record extra")
    nbclient = pytest.importorskip("nbclient", reason="needs the record extra")
    pytest.importorskip("ipykernel", reason="needs the record extra")
    cells = [
        "import torch, torch.distributed as dist\nfrom miniddp import run_ranks\noffset = 10",
        "def total(rank):\n    t = torch.tensor([rank + offset]); dist.all_reduce(t)\n"
        "    print('rank', rank)\n    return t.item()",
        "results = run_ranks(total, 2)\nprint(results, results.outputs)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    assert notebook.cells[-1].outputs[0].text == "[21, 21] ['rank 0\\n', 'rank 1\\n']\n"
