"""Bytes that collectives bring to a rank, against sizes that are known."""

import pytest
import torch
import torch.distributed as dist

from instruments.traffic import Traffic
from miniddp import run_ranks

BYTES = 4 * 1200


def received_by(rank: int) -> dict[str, float]:
    size = dist.get_world_size()
    whole = torch.ones(1200)
    part = torch.ones(1200 // size)
    left = (rank - 1) % size
    right = (rank + 1) % size

    def pass_on() -> None:
        work = dist.isend(whole.clone(), right)
        dist.recv(whole, left)
        work.wait()

    calls = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "broadcast": lambda: dist.broadcast(whole, src=1),
        "send": pass_on,
        "nothing": lambda: whole.mul_(2),
    }
    found = {}
    for name, call in calls.items():
        with Traffic() as traffic:
            call()
        found[name] = traffic.received
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_each_collective_brings_its_share(size):
    ranks = run_ranks(received_by, size)
    share = (size - 1) / size
    for rank, found in enumerate(ranks):
        assert found["all_reduce"] == pytest.approx(2 * share * BYTES)
        assert found["all_gather"] == pytest.approx(share * BYTES)
        assert found["reduce_scatter"] == pytest.approx(share * BYTES)
        assert found["broadcast"] == (0 if rank == 1 else BYTES)
        assert found["send"] == BYTES
        assert found["nothing"] == 0


def count_a_gather(rank: int) -> str:
    tensors = [torch.zeros(1) for _ in range(2)] if rank == 0 else None
    with pytest.raises(NotImplementedError) as raised, Traffic():
        dist.gather(torch.ones(1), tensors)
    return str(raised.value)


def test_what_cannot_be_counted_is_said():
    assert set(run_ranks(count_a_gather, 2)) == {"bytes of c10d::gather_"}
