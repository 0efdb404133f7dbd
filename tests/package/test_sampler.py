import json
from itertools import chain, islice, product

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

from miniddp.sampler import (
    DistributedSampler,
    check_equal_steps,
    epoch_order,
    equalise,
    shard,
)

from ..parity import row
from .ranks import run

WORLD_SIZES = range(1, 10)
BOOLEANS = (False, True)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_shards_cover_every_position_once_and_differ_by_one_at_most(world_size):
    for length, contiguous in product(range(61), BOOLEANS):
        shards = [shard(length, world_size, rank, contiguous) for rank in range(world_size)]
        assert sorted(chain(*shards)) == list(range(length))
        assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_strided_and_contiguous_shards():
    assert [list(shard(7, 3, rank)) for rank in range(3)] == [[0, 3, 6], [1, 4], [2, 5]]
    blocks = [list(shard(7, 3, rank, contiguous=True)) for rank in range(3)]
    assert blocks == [[0, 1], [2, 3], [4, 5, 6]]


@pytest.mark.parametrize("shuffle", BOOLEANS)
def test_the_order_of_an_epoch_holds_every_position(shuffle):
    for length, seed, epoch in product(range(61), range(6), range(6)):
        order = epoch_order(length, shuffle, seed, epoch)
        assert sorted(order) == list(range(length))
        assert order == epoch_order(length, shuffle, seed, epoch)


def test_another_epoch_and_another_seed_are_other_orders():
    orders = [epoch_order(50, True, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (7, 0))]
    assert orders[0] != orders[1] != orders[2] != orders[0]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_equalise_repeats_from_the_start_or_drops_the_end(world_size):
    for length in range(61):
        order = list(range(length, 0, -1))
        kept = equalise(order, world_size, drop_last=True)
        assert kept == order[: len(kept)]
        assert len(kept) == length // world_size * world_size
        filled = equalise(order, world_size, drop_last=False)
        assert len(filled) % world_size == 0
        assert 0 <= len(filled) - length < world_size
        assert all(value == order[i % length] for i, value in enumerate(filled))


@row(
    "parts",
    "exact",
    says="`DistributedSampler`: the same indices for any length, world size, seed, "
    "epoch, `shuffle` and `drop_last`; the same `len`, `num_samples`, `total_size`.",
)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("drop_last", BOOLEANS)
@pytest.mark.parametrize("shuffle", BOOLEANS)
def test_indices_are_torchs(shuffle, drop_last, world_size):
    shortest = world_size if drop_last else 1  # torch gives every rank nothing; see empty shards
    for length, rank in product(range(shortest, 61), range(world_size)):
        seed = 100 - length
        arguments = (range(length), world_size, rank, shuffle, seed, drop_last)
        ours, theirs = DistributedSampler(*arguments), TorchDistributedSampler(*arguments)
        ours.set_epoch(length % 10)
        theirs.set_epoch(length % 10)
        assert list(ours) == list(theirs)
        assert len(ours) == len(theirs)
        assert (ours.num_samples, ours.total_size) == (theirs.num_samples, theirs.total_size)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("shuffle", BOOLEANS)
@pytest.mark.parametrize("epoch", [0, 3])
def test_a_resumed_epoch_goes_on_where_it_was_left(epoch, shuffle, world_size):
    for length, rank in product((1, 2, 7, 40), range(world_size)):
        arguments = (range(length), world_size, rank, shuffle)
        whole = DistributedSampler(*arguments)
        whole.set_epoch(epoch)
        expected = list(whole)
        whole.set_epoch(epoch + 1)
        expected_next = list(whole)

        for stop in range(len(expected) + 1):
            first = DistributedSampler(*arguments)
            first.set_epoch(epoch)
            before = list(islice(iter(first), stop))
            state = json.loads(json.dumps(first.state_dict()))

            second = DistributedSampler(*arguments)
            second.load_state_dict(state)
            assert second.state_dict() == state
            second.set_epoch(second.epoch)  # as a training loop does when an epoch starts
            assert before + list(second) == expected
            second.set_epoch(epoch + 1)
            assert list(second) == expected_next


def test_only_the_first_iteration_after_a_resume_is_short():
    sampler = DistributedSampler(range(10), 2, 0)
    state = sampler.state_dict(consumed=3)
    sampler.load_state_dict(state)
    assert len(list(sampler)) == 2
    assert len(list(sampler)) == 5
    assert len(sampler) == 5


def test_another_epoch_forgets_the_place():
    sampler = DistributedSampler(range(10), 2, 0)
    sampler.load_state_dict(sampler.state_dict(consumed=3))
    sampler.set_epoch(1)
    assert len(list(sampler)) == 5


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataloader_resumes_with_the_next_batch(num_workers):
    dataset = TensorDataset(torch.arange(53))

    def loader_of(sampler):
        context = "forkserver" if num_workers else None  # torch's threads run here already
        return DataLoader(
            dataset,
            batch_size=4,
            sampler=sampler,
            num_workers=num_workers,
            multiprocessing_context=context,
        )

    def batches(loader):
        return [batch.tolist() for (batch,) in loader]

    sampler = DistributedSampler(dataset, 2, 1)
    whole = batches(loader_of(sampler))
    sampler = DistributedSampler(dataset, 2, 1)
    iterator = iter(loader_of(sampler))
    before = [next(iterator)[0].tolist() for _ in range(3)]
    if num_workers == 0:
        assert sampler.state_dict() == sampler.state_dict(consumed=3 * 4)
    else:
        assert sampler.state_dict()["consumed"] > 3 * 4  # batches that wait in the workers
    resumed = DistributedSampler(dataset, 2, 1)
    resumed.load_state_dict(sampler.state_dict(consumed=3 * 4))
    assert before + batches(loader_of(resumed)) == whole


def test_the_state_after_a_short_last_batch_is_the_end_of_the_epoch():
    sampler = DistributedSampler(range(10), 2, 0)
    state = sampler.state_dict(consumed=2 * 4)  # two batches of 4, the second with 1 sample
    assert state["consumed"] == 5
    sampler.load_state_dict(state)
    assert list(sampler) == []


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_loader_over_a_shard_evaluates_every_sample_exactly_once(world_size):
    for length, batch_size in product((0, 1, 8, 9, 10, 60), range(1, 6)):
        loaders = [
            DataLoader(range(length), batch_size, sampler=shard(length, world_size, rank))
            for rank in range(world_size)
        ]
        samples = [int(sample) for loader in loaders for batch in loader for sample in batch]
        assert sorted(samples) == list(range(length))


@pytest.mark.parametrize("change", [[6, 7, 8, 9], None], ids=["grown", "shrunk"])
@pytest.mark.parametrize(
    "use",
    [
        lambda sampler: next(iter(sampler)),  # list() would ask for the length first
        len,
        lambda sampler: sampler.set_epoch(1),
        lambda sampler: sampler.state_dict(),
        lambda sampler: sampler.load_state_dict({"epoch": 0, "consumed": 1}),
        lambda sampler: len(DataLoader(sampler.dataset, batch_size=2, sampler=sampler)),
        lambda sampler: next(iter(DataLoader(sampler.dataset, batch_size=2, sampler=sampler))),
    ],
    ids=["iterate", "len", "epoch", "save", "resume", "len of a loader", "loader"],
)
@pytest.mark.parametrize("epochs", [0, 1])
@pytest.mark.parametrize("drop_last", BOOLEANS)
def test_a_dataset_of_another_length_is_refused(drop_last, epochs, use, change):
    dataset = list(range(6))
    sampler = DistributedSampler(dataset, 2, 0, drop_last=drop_last)
    for _ in range(epochs):
        assert len(list(sampler)) == 3
    if change:
        dataset += change
    else:
        del dataset[5:]  # so that as many samples a rank as before are right without drop_last
    message = f"the dataset had 6 samples when its sampler was made, now it has {len(dataset)}"
    with pytest.raises(ValueError, match=message):
        use(sampler)


def test_a_dataset_that_grows_within_an_epoch_is_refused_in_the_next():
    dataset = list(range(6))
    sampler = DistributedSampler(dataset, 2, 0, shuffle=False)
    iterator = iter(sampler)
    assert next(iterator) == 0
    dataset.append(6)
    assert list(iterator) == [2, 4]
    with pytest.raises(ValueError, match="the dataset had 6 samples"):
        next(iter(sampler))


def test_the_place_is_that_of_the_iterator_that_moved_last():
    sampler = DistributedSampler(range(10), 2, 0, shuffle=False)
    one, two = iter(sampler), iter(sampler)
    assert [next(one), next(one), next(two)] == [0, 2, 0]
    assert sampler.state_dict()["consumed"] == 1
    assert next(one) == 4
    assert sampler.state_dict()["consumed"] == 3


def test_rank_and_world_size_are_those_of_the_process_group(monkeypatch):
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 3)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 2)
    assert list(DistributedSampler(range(7), shuffle=False)) == [2, 5, 1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: shard(3, 0, 0), r"Invalid rank 0: not in 0\.\.-1"),
        (lambda: shard(3, 2, 2), r"Invalid rank 2: not in 0\.\.1"),
        (lambda: shard(3, 2, -1), r"Invalid rank -1: not in 0\.\.1"),
        (lambda: DistributedSampler(range(3), 2, 2), r"Invalid rank 2: not in 0\.\.1"),
        (lambda: DistributedSampler([], 2, 0), "an empty shard: the dataset has 0 samples"),
        (
            lambda: DistributedSampler(range(3), 4, 0, drop_last=True),
            r"an empty shard: the dataset has 3 samples for 4 ranks \(drop_last=True\)",
        ),
        (lambda: DistributedSampler(range(3)), "process group"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_state_of_something_else_is_refused():
    with pytest.raises(ValueError, match="saved with length=None, now it is 10"):
        DistributedSampler(range(10), 2, 0).load_state_dict({"consumed": 1})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 11}, "saved with length=11, now it is 10"),
        ({"num_replicas": 4}, "saved with num_replicas=4, now it is 2"),
        ({"seed": 1}, "saved with seed=1, now it is 0"),
        ({"shuffle": False}, "saved with shuffle=False, now it is True"),
        ({"drop_last": True}, "saved with drop_last=True, now it is False"),
        ({"consumed": 6}, "consumed=6 of 5"),
        ({"consumed": -1}, "consumed=-1 of 5"),
    ],
)
def test_a_foreign_state_is_refused_and_changes_nothing(change, message):
    sampler = DistributedSampler(range(10), 2, 0)
    before = sampler.state_dict()
    with pytest.raises(ValueError, match=message):
        sampler.load_state_dict({**before, "epoch": 4, **change})
    assert sampler.state_dict() == before


def steps_of_unequal_shards(rank):
    """The published split: the last rank takes what is left over."""
    check_equal_steps(3)
    length, world_size, batch_size = 1000, 3, 1
    per_rank = length // world_size
    end = length if rank == world_size - 1 else (rank + 1) * per_rank
    with pytest.raises(ValueError, match="the ranks would take") as error:
        check_equal_steps((end - rank * per_rank) // batch_size)
    return str(error.value)


def test_unequal_steps_are_refused_with_the_counts_of_all_ranks():
    for message in run(steps_of_unequal_shards, 3):
        assert message.startswith("the ranks would take [333, 333, 334] steps: give all as many")
