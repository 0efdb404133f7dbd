"""What a probe reads out of torch's objects; it changes and draws nothing."""

import zlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from miniddp.check.recorder import Sample, is_whole


def group_name(group: Any, args: Iterable[Any]) -> str:
    """Of the process group in which a call is; "" is that of all ranks."""
    for value in (group, *args):
        if (
            isinstance(value, dist.ProcessGroup)
            and value is not dist.group.WORLD
        ):
            return str(value.group_name)
    return ""


def sends_buffers(wrapper: Any) -> bool:
    name = "forward_sync_buffers"
    by_old_name = getattr(wrapper, "broadcast_buffers", False)
    return bool(getattr(wrapper, name, by_old_name))


def sends_buffers_now(wrapper: Any) -> bool:
    has_buffers = next(wrapper.module.buffers(), None) is not None
    is_due = getattr(wrapper, "require_forward_param_sync", False)
    return has_buffers and is_due and sends_buffers(wrapper)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, str]]:
    return [
        {
            key: str(float(value))
            for key, value in group.items()
            if is_number(value)
        }
        for group in optimizer.param_groups
    ]


def is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.device.type == "cpu"
    return isinstance(value, int | float)


def sample_of_state(
    optimizer: torch.optim.Optimizer, parameters: dict[str, Tensor]
) -> Sample:
    tensors = {
        f"{key} of {name}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor) and is_whole(value)
    }
    return Sample(tensors, tensors.values())


def sample_of_inputs(inputs: Iterable[Any]) -> Sample:
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    return Sample(map(str, range(len(tensors))), tensors)


def random_state() -> int:
    """A digest of this rank's generators; it draws nothing."""
    state = torch.get_rng_state().numpy().tobytes()
    if uses_cuda():
        state += torch.cuda.get_rng_state().numpy().tobytes()
    return zlib.crc32(state)


def uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def running_statistics(module: nn.Module) -> list[Tensor]:
    """Mean and variance of the first batch normalisation of one rank alone."""
    for layer in module.modules():
        is_alone = not isinstance(layer, nn.SyncBatchNorm)
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and is_alone:
            if layer.running_mean is None or layer.running_var is None:
                return []
            return [layer.running_mean.clone(), layer.running_var.clone()]
    return []


def is_mean(loss: Tensor) -> bool:
    """Whether the loss is a mean over samples, and nothing was done to it."""
    node: Any = loss.grad_fn
    if node is None:
        return False
    if node.name().startswith("MeanBackward"):
        return True
    return getattr(node, "_saved_reduction", 0) == 1


def find_unused(wrapper: nn.Module) -> bool:
    return bool(getattr(wrapper, "find_unused_parameters", False))


def leaves(loss: Tensor) -> set[int]:
    """The ids of all tensors that this backward gives a gradient."""
    seen: set[Any] = {loss.grad_fn}
    left: list[Any] = [loss.grad_fn]
    found = set()
    while left:
        node = left.pop()
        found.add(id(getattr(node, "variable", None)))
        new = {
            following for following, _ in getattr(node, "next_functions", ())
        }
        new = new - seen - {None}
        seen |= new
        left += new
    return found


def devices_in(content: Any) -> set[int]:
    """The numbers of the GPUs that hold tensors of a checkpoint."""
    if isinstance(content, Tensor):
        return {content.device.index} if content.is_cuda else set()
    if isinstance(content, dict):
        return set().union(*map(devices_in, content.values()))
    return set()
