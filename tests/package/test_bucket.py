"""Plans of buckets as pure functions, and the flat buffer."""

import random
from collections.abc import Sequence

import pytest
import torch

from miniddp.bucket import Bucket, build_buckets, dense_stride, plan_buckets

from ..parity import row


def random_sizes(choose: random.Random) -> tuple[list[int], int, int]:
    """Sizes, a cap and a first cap, small enough that sums often equal a cap."""
    largest = choose.choice([1, 4, 20, 100])
    sizes = choose.choices(range(1, largest + 1), k=choose.randint(1, 30))
    return sizes, choose.randint(1, 2 * largest), choose.randint(1, 2 * largest)


SEEDS = pytest.mark.parametrize("seed", range(100))


@SEEDS
def test_every_parameter_is_in_one_bucket(seed: int) -> None:
    choose = random.Random(seed)
    sizes, cap, first = random_sizes(choose)
    kinds = choose.choices("ab", k=len(sizes))
    order = choose.sample(range(len(sizes)), len(sizes))
    plan = plan_buckets(sizes, kinds, order, cap, first)
    assert sorted(i for bucket in plan for i in bucket) == list(range(len(sizes)))
    assert all(len({kinds[i] for i in bucket}) == 1 for bucket in plan)


@SEEDS
def test_a_bucket_closes_when_it_has_reached_its_cap(seed: int) -> None:
    sizes, cap, first = random_sizes(random.Random(seed))
    plan = plan_buckets(sizes, ["a"] * len(sizes), list(reversed(range(len(sizes)))), cap, first)
    assert [i for bucket in plan for i in bucket] == list(reversed(range(len(sizes))))
    for number, bucket in enumerate(plan):
        limit = cap if number else first
        assert sum(sizes[i] for i in bucket[:-1]) < limit
        assert number == len(plan) - 1 or sum(sizes[i] for i in bucket) >= limit


@row("parts", "exact", says="The plan of buckets for any sizes and caps, in reverse order.")
@SEEDS
def test_the_same_plan_as_torch(seed: int) -> None:
    sizes, cap, first = random_sizes(random.Random(seed))
    order = list(reversed(range(len(sizes))))
    ours = plan_buckets([4 * size for size in sizes], ["a"] * len(sizes), order, 4 * cap, 4 * first)
    tensors = [torch.empty(sizes[i]) for i in order]
    theirs, _ = torch.distributed._compute_bucket_assignment_by_size(tensors, [4 * first, 4 * cap])
    assert ours == [[order[i] for i in bucket] for bucket in theirs]


def bucket_of(parameters: list[torch.Tensor]) -> Bucket:
    strides = [dense_stride(parameter) for parameter in parameters]
    return Bucket(0, [list(range(len(parameters)))], parameters, strides)


def buckets_of(
    parameters: list[torch.Tensor], cap_mb: float | None, order: Sequence[int]
) -> list[Bucket]:
    strides = [dense_stride(parameter) for parameter in parameters]
    return build_buckets(parameters, strides, cap_mb, order)


def test_gradients_are_views_of_one_buffer() -> None:
    parameters = [torch.randn(2, 3), torch.randn(4), torch.randn(())]
    bucket = bucket_of(parameters)
    bucket.set_buffer(torch.arange(11.0))
    assert [tuple(g.shape) for g in bucket.gradients()] == [(2, 3), (4,), ()]
    assert torch.cat([g.reshape(-1) for g in bucket.gradients()]).tolist() == list(range(11))
    bucket.gradients()[1].fill_(-1)
    assert bucket.buffer()[6:10].tolist() == [-1] * 4


def test_only_the_last_bucket_is_last() -> None:
    buckets = buckets_of([torch.ones(2), torch.ones(3)], cap_mb=0, order=[1, 0])
    assert [bucket.is_last() for bucket in buckets] == [False, True]
    assert [bucket.index() for bucket in buckets] == [0, 1]
    assert [bucket.parameters()[0].numel() for bucket in buckets] == [3, 2]


def test_a_view_has_the_strides_of_its_parameter() -> None:
    image = torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last)
    bucket = bucket_of([torch.empty(3), image])
    bucket.set_buffer(torch.arange(99.0))
    _, view = bucket.gradients()
    assert view.stride() == image.stride()
    assert view.flatten().sort().values.tolist() == list(range(3, 99))


def test_a_parameter_with_gaps_gets_a_dense_view() -> None:
    gaps = torch.empty(4, 6)[:, ::2]
    bucket = bucket_of([torch.empty(2), gaps])
    bucket.set_buffer(torch.arange(14.0))
    _, view = bucket.gradients()
    assert view.is_contiguous()
    assert view.tolist() == [[2, 3, 4], [5, 6, 7], [8, 9, 10], [11, 12, 13]]


def test_the_order_is_guessed_until_it_is_known() -> None:
    sizes = [torch.ones(2), torch.ones(3), torch.ones(4).double()]
    indices = [bucket.indices for bucket in buckets_of(sizes, 1000, ())]
    assert indices == [[2], [0, 1]], "one bucket for each dtype, the last parameters first"


@pytest.mark.parametrize(("cap_mb", "buckets"), [(None, [1, 25, 14]), (10, [10, 10, 10, 10])])
def test_only_the_default_begins_with_a_small_bucket(
    cap_mb: float | None, buckets: list[int]
) -> None:
    mebibytes = [torch.empty(2**18, device="meta")] * 40
    found = buckets_of(mebibytes, cap_mb, range(40))
    assert [len(bucket.indices) for bucket in found] == buckets
