import torch

from instruments.bench_host import HostTimes, ManyTensors, bench, norms, ratio, report


def test_the_ratio_is_the_median_of_those_of_the_rounds():
    torchs = HostTimes("torch", 0.5, (1.0, 2.0, 4.0))
    ours = HostTimes("miniddp", 0.25, (2.0, 2.0, 2.0))
    assert ratio([torchs, ours]) == 1.0
    line = report("3 tensors", [torchs, ours], 1000)
    assert "torch 2000.0  miniddp 2000.0 µs per tensor" in line
    assert "miniddp / torch 1.000  construction 500.0 and 250.0 ms" in line


def test_both_classes_take_the_same_steps():
    assert ManyTensors(3)(torch.ones(8, 8)).requires_grad
    assert len(list(norms().buffers())) == 3 * 53
    for views in (False, True):
        times = bench(lambda: ManyTensors(3), torch.ones(8, 8), 2, views)
        assert [time.wrapper for time in times] == ["torch", "miniddp"]
        assert all(len(time.rounds) == 2 for time in times)
