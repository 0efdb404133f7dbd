"""Communication hooks beside torch's own, and what they send."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional as F

import miniddp
from miniddp import hooks
from miniddp.process import device

from .ddp_cases import Mlp, assert_equal_on_all_ranks, joined, part, reference, seeded
from .ranks import run


def gradients(rank: int, hook: Any, state: Any = None, steps: int = 1) -> list[torch.Tensor]:
    """The gradients after each step under a hook; single-process ones if it is None."""
    world_size = dist.get_world_size()
    model = reference(Mlp) if hook is None else miniddp.DistributedDataParallel(seeded(Mlp, rank))
    if hook is not None:
        model.register_comm_hook(state, hook)
    seen = []
    for step in range(steps):
        model.zero_grad()
        x, y = joined(step, world_size)
        if hook is not None:
            x, y = part(rank, world_size, x, y)
        F.cross_entropy(model(x), y).backward()
        seen.append(torch.cat([p.grad.flatten() for p in model.parameters()]).clone())
    if hook is not None and hook is not hooks.noop_hook:
        assert_equal_on_all_ranks(model)
    return seen


def compare_with_one_process(rank: int) -> None:
    (expected,) = gradients(rank, None)
    (exact,) = gradients(rank, hooks.allreduce_hook)
    torch.testing.assert_close(exact, expected, rtol=1e-4, atol=1e-6)
    for hook, digits in ((hooks.fp16_compress_hook, 11), (hooks.bf16_compress_hook, 8)):
        (rounded,) = gradients(rank, hook)
        error = (rounded - expected).abs().max() / expected.abs().max()
        assert 0 < error < 2 ** (2 - digits), hook.__name__
    (local,) = gradients(rank, hooks.noop_hook)
    assert not torch.allclose(local, expected, rtol=1e-2)


def test_the_mean_up_to_the_precision_of_what_is_sent() -> None:
    run(compare_with_one_process, 2)


def large_gradients(rank: int) -> bool:
    """The sum of the ranks' gradients overflows fp16, their mean does not."""
    model = nn.Linear(1, 1, bias=False)
    ddp = miniddp.DistributedDataParallel(model)
    ddp.register_comm_hook(None, hooks.fp16_compress_hook)
    (ddp(torch.ones(1, 1)) * 40_000).sum().backward()
    assert model.weight.grad.item() == pytest.approx(40_000, rel=1e-3)
    return bool(torch.isinf(torch.tensor(80_000.0).half()))


def test_dividing_comes_before_the_sum() -> None:
    assert all(run(large_gradients, 2))


class Wide(nn.Module):
    """One matrix of which two ranks' gradients have rank 2 together."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(12, 20))
        self.bias = nn.Parameter(torch.zeros(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t() + self.bias


def low_rank(rank: int, approximation: int, forget: bool = False) -> list[float]:
    """The error of the sum of all gradients sent so far, step by step."""
    ddp = miniddp.DistributedDataParallel(Wide())
    state = hooks.PowerSGDState(
        None, matrix_approximation_rank=approximation, start_powerSGD_iter=2
    )
    ddp.register_comm_hook(state, hooks.powerSGD_hook)
    sent, wanted = torch.zeros(12, 20), torch.zeros(12, 20)
    errors = []
    for step in range(12):
        ddp.zero_grad()
        x = torch.randn(2, 1, 20, generator=torch.Generator(device()).manual_seed(step))
        target = torch.randn(2, 1, 12, generator=torch.Generator(device()).manual_seed(100 + step))
        (ddp(x[rank]) * target[rank]).sum().backward()
        exact = torch.einsum("rbo,rbi->oi", target, x) / 2
        sent += ddp.module.weight.grad
        wanted += exact
        torch.testing.assert_close(ddp.module.bias.grad, target.mean(0)[0])
        for lost in state.errors.get(0, []) if forget else []:
            lost.zero_()
        errors.append(((sent - wanted).norm() / wanted.norm()).item())
    assert_equal_on_all_ranks(ddp)
    return errors


def test_power_sgd_is_exact_where_the_rank_suffices() -> None:
    assert max(run(low_rank, 2, 3)[0]) < 1e-4


def test_power_sgd_makes_up_for_what_it_lost() -> None:
    errors, forgetful = run(low_rank, 2, 1)[0], run(low_rank, 2, 1, True)[0]
    assert errors[1] < 1e-4, "the first iterations are not compressed"
    assert errors[2] > 0.01, "rank 1 cannot hold a matrix of rank 2"
    assert errors[-1] < forgetful[-1], "what a step lost is sent later"


@pytest.mark.parametrize("wrong", [{"start_powerSGD_iter": 1}, {"matrix_approximation_rank": 0}])
def test_power_sgd_refuses_what_cannot_work(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1 and start_powerSGD_iter at least 2"):
        hooks.PowerSGDState(None, **wrong)


def with_torch(rank: int) -> list[torch.Tensor]:
    """The gradients of torch's DDP under this package's hooks."""
    found = []
    for hook in (hooks.allreduce_hook, hooks.fp16_compress_hook, hooks.noop_hook):
        ddp = nn.parallel.DistributedDataParallel(seeded(Mlp, 0))
        ddp.register_comm_hook(None, hook)
        x, y = part(rank, dist.get_world_size(), *joined(0, dist.get_world_size()))
        F.cross_entropy(ddp(x), y).backward()
        found.append(torch.cat([p.grad.flatten() for p in ddp.parameters()]).clone())
    return found


def test_torch_takes_these_hooks_too() -> None:
    (mean, rounded, local), (other_mean, _, other_local) = run(with_torch, 2)
    assert torch.equal(mean, other_mean)
    torch.testing.assert_close(mean, (local + other_local) / 2)
    torch.testing.assert_close(rounded, mean, rtol=1e-2, atol=1e-4)


def complex_mean(rank: int) -> None:
    """A third of a complex number rounds as its two parts do."""
    means = []
    for wrap, hook in (
        (nn.parallel.DistributedDataParallel, default_hooks.allreduce_hook),
        (miniddp.DistributedDataParallel, hooks.allreduce_hook),
    ):
        torch.manual_seed(0)
        ddp = wrap(nn.Linear(7, 9, dtype=torch.complex64))
        ddp.register_comm_hook(None, hook)
        torch.manual_seed(1 + rank)
        ddp(torch.randn(5, 7, dtype=torch.complex64)).abs().square().sum().backward()
        means.append(ddp.module.weight.grad)
    assert torch.equal(*means)


def test_a_complex_mean_has_torchs_bits() -> None:
    run(complex_mean, 3)
