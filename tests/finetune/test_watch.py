"""The rank that is slow or stuck is named, and not one that waits for it."""

import json
import logging
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from finetune import watch
from finetune.watch import Pace, missing, watching

from ..package.ranks import run
from .training_cases import command


def said(*ranks: tuple[int, str]) -> list[list[bytes]]:
    """What the ranks said in five rounds; who is "silent" says the same each time."""
    return [
        [
            json.dumps([0 if place == "silent" else moment, calls, place]).encode()
            for calls, place in ranks
        ]
        for moment in range(5)
    ]


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([(7, "a"), (7, "b")], ""),
        ([(7, "a"), (6, "b")], "the others wait for rank 1 (in b)"),
        (
            [(7, "a"), (6, "silent"), (5, "c")],
            "the others wait for rank 1 (last heard of in silent)",
        ),
        ([(7, "silent"), (7, "b")], "the others wait for rank 0 (last heard of in silent)"),
        ([(6, "a"), (7, "b"), (6, "c")], "the others wait for rank 0 (in a), rank 2 (in c)"),
    ],
)
def test_who_is_silent_or_else_behind_is_missing(ranks, expected):
    assert missing(said(*ranks))[1] == expected
    assert missing(said(*ranks)[1:]) == (set(), "")


def log_to(file: Path) -> None:
    file.touch()
    watch.logger.addHandler(logging.FileHandler(file))


@pytest.mark.parametrize("guilty", [0, 1])
def test_a_rank_that_is_elsewhere_is_named_by_the_first_that_waits(tmp_path, guilty):
    def be_elsewhere(file):
        while not file.read_text():
            time.sleep(0.02)

    def work(rank):
        log_to(tmp_path / str(rank))
        first = min({0, 1, 2} - {guilty})
        dist.barrier()
        with watching(1.0):
            if rank == guilty:
                be_elsewhere(tmp_path / str(first))
            dist.all_reduce(torch.ones(1))

    run(work, 3)
    texts = [(tmp_path / str(rank)).read_text().splitlines() for rank in range(3)]
    (text,) = texts.pop(min({0, 1, 2} - {guilty}))
    assert text.startswith(f"the others wait for rank {guilty} (in test_watch")
    assert text.endswith(" in be_elsewhere)")
    assert texts == [[], []]


def fail() -> None:
    with watching(60):
        for thread in threading.enumerate():
            if isinstance(thread, watch.Watch):
                thread.join()
        raise RuntimeError("Timed out")


def test_the_error_of_a_collective_says_who_was_missing():
    def work(rank):
        watch.Watch.listen = lambda self: setattr(self, "complaint", "the others wait for rank 1")
        with pytest.raises(RuntimeError) as caught:
            fail()
        return caught.value.__notes__

    assert run(work, 2) == [["the others wait for rank 1"]] * 2


def test_a_store_that_is_silent_is_named_once_on_each_machine(tmp_path):
    def lose(_):
        raise dist.DistStoreError("wait timeout after 1000ms")

    def work(rank):
        log_to(tmp_path / str(rank))
        watch.Watch.listen = lose
        with pytest.raises(RuntimeError) as caught:
            fail()
        return caught.value.__notes__

    line = "the others wait for torchrun, whose store is silent"
    assert run(work, 2) == [[line]] * 2
    texts = [(tmp_path / str(rank)).read_text().splitlines() for rank in range(2)]
    assert texts == [[line], []]


class Mute:
    """A store that takes everything and answers nothing: torch's client waits for ever."""

    def set(self, key: str, text: str) -> None:
        pass

    def multi_get(self, keys: list[str]) -> None:
        threading.Event().wait()


def test_a_store_that_never_answers_is_named_too():
    def wait_for_a_complaint():
        with watching(2):
            (thread,) = [t for t in threading.enumerate() if isinstance(t, watch.Watch)]
            thread.store = Mute()
            while not thread.complaint:
                time.sleep(0.05)
            raise RuntimeError("Timed out")

    def work(rank):
        with pytest.raises(RuntimeError) as caught:
            wait_for_a_complaint()
        return caught.value.__notes__

    assert run(work, 2) == [["the others wait for torchrun, whose store is silent"]] * 2


KILLED = """
import os, threading, time
import torch
import torch.distributed as dist
from finetune import job
from finetune.watch import watching

TIMEOUT = 20
job.start(timeout=600)
with watching(TIMEOUT):
    if dist.get_rank() == 1:
        time.sleep(600)
    threading.Timer(TIMEOUT, os.abort).start()
    dist.all_reduce(torch.ones(1))
"""


def test_who_is_missing_is_said_before_nccl_would_end_the_process(tmp_path):
    """NCCL's watchdog aborts at the timeout: no error is raised, no Python runs. So does this."""
    program = tmp_path / "killed.py"
    program.write_text(KILLED)
    ended = command(ranks=2, program=[str(program)])
    assert ended.returncode == 1
    lines = ended.stderr.splitlines()
    said = lines.index("the others wait for rank 1 (in killed.py:12 in <module>)")
    (aborted,) = [number for number, line in enumerate(lines) if "exitcode  : -6 " in line]
    assert said < aborted


def test_the_calls_of_all_backends_count(monkeypatch):
    """NCCL's of a GPU, and gloo's, which gathers and broadcasts what lies in host memory."""

    class Backend:
        def __init__(self, calls):
            self._get_sequence_number_for_group = lambda: calls

    backends = {"cpu": Backend(3), "cuda": Backend(40)}
    backends["xpu"] = backends["cuda"]
    world = SimpleNamespace(_device_types=list(backends), _get_backend=backends.get)
    monkeypatch.setattr(watch.dist, "group", SimpleNamespace(WORLD=world))
    assert watch.collectives_called() == 43


def waits(file: str, module: str) -> str:
    """What is said of a main thread that waits in a function of this file and module."""
    names = {"__name__": module}
    exec(compile("def wait(found):\n    while not found: pass", file, "exec"), names)
    found = []

    def look():
        location = "threading"  # where the thread is started
        while location.startswith("threading"):
            location = watch.main_thread_location()
        found.append(location)

    thread = threading.Thread(target=look)
    thread.start()
    names["wait"](found)
    thread.join()
    return found[0]


def test_a_place_is_named_by_its_file_or_else_by_its_module():
    assert waits("/home/me/train.py", "__main__") == "train.py:2 in wait"
    assert waits("<dynamic-code>", "my.package.data") == "data:2 in wait"  # cloudpickle 3.1.3


@pytest.mark.parametrize(
    "file", ["/lib/torch/nn/modules/module.py", "<eval_with_key>.5", "<string>"]
)
def test_code_of_torch_is_no_place_with_or_without_a_file(file):
    assert waits(file, "torch.fx.graph_module").endswith(" in waits")
    assert waits(file, "torchvision.ops").endswith(":2 in wait")


def test_a_slow_rank_is_named_once_by_what_it_does_before_it_waits(tmp_path):
    def work(rank):
        log_to(tmp_path / str(rank))
        module = torch.nn.Linear(2, 1)
        pace = Pace(module, every=5)
        for _ in range(10):
            with pace:
                time.sleep(0.1 * (rank == 1))
                module(torch.ones(2)).backward()
                dist.all_reduce(module.weight.grad)

    run(work, 3)
    for rank in range(3):  # all know it; the log of a job is rank 0's
        (text,) = (tmp_path / str(rank)).read_text().splitlines()
        assert text.startswith("rank 1 is slow: 1")


def test_of_one_rank_nobody_is_slow_and_nobody_waits(tmp_path):
    def work(rank):
        log_to(tmp_path / "log")
        pace = Pace(module := torch.nn.Linear(2, 1), every=1)
        with watching(1.0), pace:
            module(torch.ones(2)).backward()

    run(work, 1)
    assert (tmp_path / "log").read_text() == ""
