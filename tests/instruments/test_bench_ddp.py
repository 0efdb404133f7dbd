"""The bench of the wrappers, and how a bench finds the GPUs of a machine."""

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

from instruments import backend, bench_ddp, clock
from instruments.bench_ddp import Steps, bench, main, ratio, report


def steps(wrapper: str, *rounds: float) -> Steps:
    return Steps(wrapper, "gloo", 5_000_000, rounds)


def test_ratio_compares_round_by_round() -> None:
    assert ratio(steps("simple", 1.0, 9.0, 1.0), steps("miniddp", 2.0, 10.0, 2.0)) == 0.5


def test_a_report_has_a_line_for_each_wrapper_and_two_ratios() -> None:
    timings = [steps("torch", 2.0, 4.0), steps("miniddp", 1.0, 3.0), steps("simple", 2.0, 6.0)]
    assert report(timings).splitlines() == [
        "5.0 million parameters",
        "  torch      3000.0 ms",
        "  miniddp    2000.0 ms",
        "  simple     4000.0 ms",
        "  miniddp / torch  0.625",
        "  simple / miniddp 2.000",
    ]


def test_bench_times_every_wrapper() -> None:
    timings = bench(2, 5, rounds=2, sequences=1)
    assert [timing.wrapper for timing in timings] == ["torch", "miniddp", "simple"]
    assert {timing.parameters for timing in timings} == {4_974_800}
    assert all(len(timing.rounds) == 2 for timing in timings)
    assert min(seconds for timing in timings for seconds in timing.rounds) > 0


@pytest.mark.parametrize("arguments", [["--ranks", "0"], ["--rounds", "0"], ["--sequences", "0"]])
def test_bad_options_end_in_one_line(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_ddp", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    message = "error: expected at least 1 rank, 1 round and 1 sequence"
    assert capsys.readouterr().err.splitlines()[-1].endswith(message)


# A machine with GPUs


def test_without_a_gpu_no_rank_is_started_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(backend, "run_ranks", None)
    assert backend.backend_of(2) == "gloo"


def test_with_gpus_the_ranks_say_what_they_have_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    def run_ranks(ask: Any, world_size: int, **options: Any) -> list[str]:
        started.append((world_size, options))
        return [ask(rank) for rank in range(world_size)]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backend, "run_ranks", run_ranks)
    monkeypatch.setattr(backend, "init_process_group", lambda: started.append("group"))
    monkeypatch.setattr(dist, "get_backend", lambda: "cpu:gloo,cuda:nccl")
    assert backend.backend_of(2) == "cpu:gloo,cuda:nccl"
    assert started == [(2, {"backend": None}), "group", "group"]


def test_the_bench_takes_the_backend_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[Any] = []

    def run_ranks(measure: Any, ranks: int, *arguments: Any, **options: Any) -> list[list[Steps]]:
        passed.append((ranks, arguments[0], options["backend"]))
        return [[]]

    monkeypatch.setattr(bench_ddp, "backend_of", lambda ranks: f"that of {ranks}")
    monkeypatch.setattr(bench_ddp, "run_ranks", run_ranks)
    bench(8, 25)
    assert passed == [(8, "that of 8", "that of 8")]


def test_times_are_compared_on_the_ranks_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL refuses a tensor of the CPU. The meta device stands in for the GPU."""
    used: list[torch.device] = []
    monkeypatch.setattr(clock, "device", lambda: torch.device("meta"))
    monkeypatch.setattr(dist, "all_reduce", lambda seconds, operation: used.append(seconds.device))
    with pytest.raises(RuntimeError, match="meta"):  # it holds no number to return
        clock.slowest(1.0)
    assert used == [torch.device("meta")]
