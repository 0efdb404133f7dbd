import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instruments.bench_ring import ALGORITHMS, Timing, bench, fit_ring, main, ratio, report


def timing(size, rounds, algorithm="ring", ranks=4):
    return Timing(algorithm, "gloo", ranks, size, tuple(rounds))


def test_bandwidths():
    four = timing(600, [3.0, 1.0, 2.0])
    assert four.seconds == 2.0
    assert four.algorithm_bandwidth == 300
    assert four.bus_bandwidth == 450  # 2 x 3 / 4
    assert timing(600, [2.0], ranks=2).bus_bandwidth == 300


@given(st.integers(2, 8), st.floats(1e-6, 1e-3), st.floats(1e-11, 1e-8))
def test_fit_finds_the_alpha_and_beta_that_made_the_timings(ranks, alpha, beta):
    timings = [
        timing(size, [2 * (ranks - 1) * (alpha + beta * size / ranks)], ranks=ranks)
        for size in (10**4, 10**6, 10**8)
    ]
    link = fit_ring(timings)
    assert (link.alpha, link.beta) == pytest.approx((alpha, beta), rel=1e-6)


def test_ratio_compares_round_by_round():
    slow_second_round = timing(8, [1.0, 9.0, 1.0]), timing(8, [2.0, 10.0, 2.0])
    assert ratio(*slow_second_round) == 0.5


def test_bench_times_every_size_and_algorithm():
    timings = bench(2, [4000, 400_000], rounds=2, algorithms=list(ALGORITHMS))
    assert [(timing.bytes, timing.algorithm) for timing in timings] == [
        (size, name) for size in (4000, 400_000) for name in ("ring", "library", "root")
    ]
    assert all(len(timing.rounds) == 2 for timing in timings)
    assert all(min(timing.rounds) > 0 for timing in timings)
    lines = report(timings).splitlines()
    assert [line.split(":")[0] for line in lines[-2:]] == ["ring", "library"]
    assert len(lines) == 1 + len(timings) + 2


@pytest.mark.parametrize("arguments", [["--ranks", "1"], ["--megabytes", "0"], ["--rounds", "0"]])
def test_bad_options_end_in_one_line(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_ring", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    message = "error: expected at least 2 ranks, sizes above 0 MB and at least 1 round"
    assert capsys.readouterr().err.splitlines()[-1].endswith(message)
