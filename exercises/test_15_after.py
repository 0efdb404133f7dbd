"""When `exercises/15_after.py` is right: one process's weights, for 2 Ψ and 1/N of the state."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import check_close, load
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from miniddp import run_ranks

exercise = load("15_after")
STEPS = 3


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def loss_of(net: nn.Module, ranks: list[int], number: int) -> Tensor:
    def inputs(rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * rank + number)
        return torch.randn(4, 3, generator=generator, dtype=torch.float64)

    return net(torch.cat([inputs(rank) for rank in ranks])).square().mean()


class Sent(TorchDispatchMode):
    """Bytes that collectives and messages of this rank send, an all-reduce as a ring sends it."""

    total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            part = (dist.get_world_size() - 1) / dist.get_world_size()
            first = sum(leaf.nbytes for leaf in tree_leaves(args[0]) if isinstance(leaf, Tensor))
            name = func._schema.name.removeprefix("c10d::")
            if name == "_reduce_scatter_base_":
                first = args[1].nbytes
            parts = {"recv_": 0.0, "barrier": 0.0, "send": 1.0, "allreduce_": 2 * part}
            self.total += first * parts.get(name, part)
        return func(*args, **(kwargs or {}))


def train(rank: int, ranks: list[int]) -> tuple[list[Tensor], int, float, list[Tensor]]:
    """The weights, the elements of the optimizer's state, the bytes of one step, its gradients."""
    group = dist.new_group(ranks)
    net = make_net()
    if rank not in ranks:
        return list(net.parameters()), 0, 0.0, []
    parameters = list(net.parameters())
    shard = exercise.shard_of(parameters, group)
    optimizer = torch.optim.AdamW([shard], lr=0.05)
    seen: list[Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(shard.grad.clone()))
    for number in range(STEPS):
        loss_of(net, [rank], number).backward()
        with Sent() as sent:
            exercise.sharded_step(parameters, shard, optimizer, group)
        left = [tensor for tensor in [*parameters, shard] if tensor.grad is not None]
        assert not left, f"{len(left)} tensors still have a gradient after the step"
    state = optimizer.state[shard]
    elements = sum(value.numel() for name, value in state.items() if name != "step")
    return [parameter.detach() for parameter in parameters], elements, sent.total, seen


def expected(ranks: list[int]) -> list[Tensor]:
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    for number in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, ranks, number).backward()
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


def mean_gradient(ranks: list[int]) -> Tensor:
    """Of the first step, flat."""
    net = make_net()
    loss_of(net, ranks, 0).backward()
    return torch.cat([parameter.grad.flatten() for parameter in net.parameters()])


def check(found: list[Tensor], wanted: list[Tensor], rank: int) -> None:
    for i, (own, right) in enumerate(zip(found, wanted, strict=True)):
        check_close(own, right, f"parameter {i} of rank {rank}")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_it_trains_what_one_process_trains(world_size: int) -> None:
    ranks = list(range(world_size))
    results = run_ranks(train, world_size, ranks, timeout=30)
    count = sum(parameter.numel() for parameter in make_net().parameters())
    shard = math.ceil(count / world_size)
    optimized = torch.cat([gradients[0] for _, _, _, gradients in results])[:count]
    check_close(optimized, mean_gradient(ranks), "the gradient that the optimizers got")
    for rank, (weights, elements, *_) in enumerate(results):
        check(weights, expected(ranks), rank)
        assert elements == 2 * shard, f"Adam's state on rank {rank} has {elements} elements"
        for own, other in zip(weights, results[0][0], strict=True):
            assert torch.equal(own, other), f"ranks 0 and {rank} have different weights"
    sent = sum(result[2] for result in results) / world_size
    assert sent <= 8 * 2 * (world_size - 1) * shard, f"a rank sends {sent:.0f} bytes"


def test_only_the_ranks_of_the_group_take_part() -> None:
    results = run_ranks(train, 3, [0, 2], timeout=30)
    for rank in (0, 2):
        check(results[rank][0], expected([0, 2]), rank)
