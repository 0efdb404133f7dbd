"""Means over micro-batches and ranks that differ in size, against one process with all samples."""

import pytest
import torch

from miniddp.accumulation import global_mean, mean_weights
from miniddp.launch import RanksFailed
from miniddp.process import device

from .ranks import run

PARTS = [[[0, 1, 2, 3, 4], [5]], [[6, 7], [8, 9, 10]]]
"""The samples of each micro-batch of each rank: 5 + 1 and 2 + 3."""


def test_the_mean_counts_every_sample_once_whoever_has_it():
    values = torch.rand(5, 3)
    shares = [values[:4], values[4:], values[:0]]

    def mean(rank):
        own = shares[rank].to(device())
        return global_mean(own.sum(dim=0), len(own))

    for found in run(mean, 3):
        torch.testing.assert_close(found, values.double().mean(dim=0), atol=1e-6, rtol=0)
        assert found.dtype == torch.float64
    mean_of_means = (shares[0].mean(dim=0) + shares[1].mean(dim=0)) / 2
    assert not torch.allclose(mean_of_means, values.mean(dim=0), atol=1e-3)


def test_a_scalar_has_a_scalar_mean_and_its_own_value_stays():
    def mean(rank):
        total = torch.tensor(6.0 * rank, requires_grad=True)
        return global_mean(total, 2), total.item()

    assert run(mean, 2) == [(torch.tensor(1.5), 0.0), (torch.tensor(1.5), 6.0)]


COUNTS = (70_001, 257, 2**24 + 1)
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.int64]


def means_of_large_counts(rank):
    means = {}
    for dtype in DTYPES:
        total = torch.tensor([64.0, 128.0], dtype=dtype)
        for kind in (int, torch.tensor):
            means[dtype, kind] = [global_mean(total, kind(count)).tolist() for count in COUNTS]
    return means


def test_the_count_is_not_rounded_to_the_dtype_of_the_total():
    """70,000 is more than float16 holds, and bfloat16 rounds 257 to 256."""
    for means in run(means_of_large_counts, 2):
        assert len(means) == 8
        for kind, found in means.items():
            assert found == [[64 / n, 128 / n] for n in COUNTS], kind


@pytest.mark.parametrize("function", ["global_mean", "mean_weights"])
def test_no_sample_on_any_rank_is_an_error_on_every_rank(function):
    def mean(rank):
        return global_mean(torch.zeros(2), 0) if function == "global_mean" else mean_weights([0, 0])

    with pytest.raises(RanksFailed) as caught:
        run(mean, 2)
    assert set(caught.value.tracebacks) == {0, 1}
    for text in caught.value.tracebacks.values():
        assert "ValueError: there is no mean of nothing: no rank has a sample" in text


def test_weights_of_equal_micro_batches_are_those_of_plain_accumulation():
    assert run(lambda rank: mean_weights([7, 7, 7, 7]), 3) == [[0.25] * 4] * 3


def test_weights_are_shares_of_all_samples_times_the_ranks():
    counts = [[len(part) for part in parts] for parts in PARTS]
    found = run(lambda rank: mean_weights(counts[rank]), 2)
    assert found == [[10 / 11, 2 / 11], [4 / 11, 6 / 11]]
