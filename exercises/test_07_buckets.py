"""When `exercises/07_buckets.py` is right: its plan, its gradients, and when it sends."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import check_close, load
from torch import Tensor, nn

from miniddp import run_ranks
from miniddp.bucket import plan_buckets

exercise = load("07_buckets")
WIDTH = 4
LAYER = 8 * WIDTH * WIDTH  # bytes of a layer's gradient, in float64


class Net(nn.Module):
    """Five layers, used in the order that a rank is given."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(5))

    def forward(self, inputs: Tensor, order: list[int]) -> Tensor:
        inputs = self.frozen(inputs)
        for i in order:
            inputs = self.layers[i](inputs).tanh()
        return inputs.square().mean()


def make_net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def inputs_of(rank: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + number)
    return torch.randn(3, WIDTH, dtype=torch.float64, generator=generator)


def gradients(net: Net) -> list[Tensor]:
    return [layer.weight.grad.clone() for layer in net.layers]


def alone(rank: int, order: list[int], number: int) -> list[Tensor]:
    net = make_net()
    net(inputs_of(rank, number), order).backward()
    return gradients(net)


def check(found: list[list[Tensor]], orders: list[list[int]], number: int) -> None:
    """Whether each rank found the mean over the ranks."""
    everyone = [alone(rank, order, number) for rank, order in enumerate(orders)]
    wanted = [torch.stack(same).mean(0) for same in zip(*everyone, strict=True)]
    for rank, gradients_found in enumerate(found):
        for layer, gradient in enumerate(gradients_found):
            mistakes = {"this rank's own gradient, not the mean": everyone[rank][layer]}
            where = f"layer {layer} on rank {rank} after pass {number + 1}"
            check_close(gradient, wanted[layer], where, mistakes)


def train(
    rank: int, orders: list[list[int]], cap_bytes: int, passes: int
) -> tuple[list[list[Tensor]], list[list[int]]]:
    """The gradients after each pass, and how many gradients there were at each all-reduce."""
    net, ready, sent = make_net(), [], []
    for layer in net.layers:
        layer.weight.register_post_accumulate_grad_hook(ready.append)
    finish = exercise.average_in_buckets(net, cap_bytes)
    reduce = dist.all_reduce

    def all_reduce(tensor: Tensor, *args, **kwargs):
        sent[-1].append(len(ready))
        return reduce(tensor, *args, **kwargs)

    found = []
    with mock.patch.object(dist, "all_reduce", all_reduce):
        for number in range(passes):
            ready.clear()
            sent.append([])
            net.zero_grad()
            net(inputs_of(rank, number), orders[rank]).backward()
            finish()
            found.append(gradients(net))
    return found, sent


FORWARD = [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("num_bytes", "cap_bytes", "wanted"),
    [
        ([8, 8, 8], 100, [[2, 1, 0]]),
        ([8, 8, 8], 8, [[2], [1], [0]]),
        ([8, 8, 8, 8, 8], 16, [[4, 3], [2, 1], [0]]),
        ([4, 30, 2, 9, 1], 10, [[4, 3], [2, 1], [0]]),
    ],
)
def test_a_bucket_closes_when_it_has_reached_its_cap(
    num_bytes: list[int], cap_bytes: int, wanted: list[list[int]]
) -> None:
    assert exercise.plan(num_bytes, cap_bytes) == wanted
    order = range(len(num_bytes))[::-1]
    assert wanted == plan_buckets(num_bytes, [0] * len(num_bytes), order, cap_bytes, cap_bytes)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_pass_leaves_the_mean(world_size: int) -> None:
    orders = [FORWARD] * world_size
    results = run_ranks(train, world_size, orders, 2 * LAYER, 2, timeout=30)
    for number in range(2):
        check([found[number] for found, _ in results], orders, number)


def test_a_full_bucket_is_sent_during_backward() -> None:
    for _, sent in run_ranks(train, 2, [FORWARD, FORWARD], 2 * LAYER, 2, timeout=30):
        assert sent == [[2, 4, 5], [2, 4, 5]], "gradients that were there at each all-reduce"


def test_ranks_that_compute_in_another_order_send_in_the_same() -> None:
    orders = [FORWARD, [2, 4, 0, 3, 1]]
    results = run_ranks(train, 2, orders, 2 * LAYER, 1, timeout=30)
    check([found[0] for found, _ in results], orders, 0)
    assert results[0][1] == [[2, 4, 5]]
    assert results[1][1] == [[4, 5, 5]]
