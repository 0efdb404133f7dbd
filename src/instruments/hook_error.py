"""What a communication hook sends, and how far its mean is from the true one."""

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist
from torch import Tensor, nn

from instruments.gradients import flat_gradient, relative_error
from instruments.replicas import mean_over_ranks, spread_of
from miniddp import DistributedDataParallel, hooks

WARM_UP_PASSES = 2
"""PowerSGD begins after them: it needs the buckets of the second pass."""

Hook = Callable[[Any, Any], Any]
LossOf = Callable[[nn.Module], Tensor]
"""A forward pass, and its loss."""


class Trial(NamedTuple):
    """A hook, tried.

    Attributes:
        num_bytes: What this rank passes to all-reduces in one pass.
        once: The error of that pass: its distance from the mean in float32, over the
            length of the mean.
        in_mean: The error of the mean of several passes with the same gradients.
        equal: Whether all ranks end with the same.
    """

    num_bytes: int
    once: float
    in_mean: float
    equal: bool


def try_hooks(
    build: Callable[[], nn.Module], loss_of: LossOf, passes: int
) -> dict[str, Trial]:
    """Every hook of miniddp, PowerSGD with two ranks of its matrices."""
    tried: dict[str, tuple[Hook, object]] = {
        "allreduce": (hooks.allreduce_hook, None),
        "fp16": (hooks.fp16_compress_hook, None),
        "bf16": (hooks.bf16_compress_hook, None),
        "PowerSGD 1": (hooks.powerSGD_hook, power_sgd(1)),
        "PowerSGD 8": (hooks.powerSGD_hook, power_sgd(8)),
        "noop": (hooks.noop_hook, None),
    }
    return {
        name: try_hook(build, loss_of, hook, state, passes)
        for name, (hook, state) in tried.items()
    }


def power_sgd(matrix_rank: int) -> hooks.PowerSGDState:
    return hooks.PowerSGDState(
        None,
        matrix_approximation_rank=matrix_rank,
        start_powerSGD_iter=WARM_UP_PASSES,
    )


def try_hook(
    build: Callable[[], nn.Module],
    loss_of: LossOf,
    hook: Hook,
    state: object,
    passes: int,
) -> Trial:
    """Average the same gradients several times.

    Passes to warm up come first and do not count. Every rank calls it, with a loss of
    its own and equal models.
    """
    mean = mean_over_ranks(gradient(build(), loss_of))
    ddp = DistributedDataParallel(build())
    ddp.register_comm_hook(state, hook)
    for _ in range(WARM_UP_PASSES):
        gradient(ddp, loss_of)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        first = gradient(ddp, loss_of)
    num_bytes = sum(call.args[0].nbytes for call in all_reduce.call_args_list)
    total = first.clone()
    for _ in range(passes - 1):
        total += gradient(ddp, loss_of)
    return Trial(
        num_bytes=num_bytes,
        once=relative_error(first, mean),
        in_mean=relative_error(total / passes, mean),
        equal=spread_of(first) == 0,
    )


def gradient(module: nn.Module, loss_of: LossOf) -> Tensor:
    """All gradients of one backward pass, as one vector."""
    module.zero_grad()
    loss_of(module).backward()
    return flat_gradient(module)
