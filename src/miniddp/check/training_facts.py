"""What can be read from a wrapper, a loss or an optimizer as it is."""

import zlib
from typing import Any

import torch
from torch import Tensor, nn

from miniddp.check.samples import Sample, is_whole
from miniddp.check.trained import Optimizer

HAVE_MODES = (
    nn.modules.batchnorm._BatchNorm,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
)
"""Layers that work otherwise in `eval()`."""


def find_unused(wrapper: nn.Module) -> bool:
    return bool(getattr(wrapper, "find_unused_parameters", False))


def unused_bytes(wrapper: Any) -> int | None:
    """Of parameters that got no gradient in the last pass, as torch counts."""
    log: dict[str, int] = getattr(wrapper, "_get_ddp_logging_data", dict)()
    return log.get("unused_parameter_size")


def sends_buffers(wrapper: Any) -> bool:
    by_old_name = getattr(wrapper, "broadcast_buffers", False)
    return bool(getattr(wrapper, "forward_sync_buffers", by_old_name))


def mode_of(wrapper: nn.Module) -> str | None:
    """Of the model inside, if it matters."""
    model: Any = wrapper.module
    if not any(isinstance(layer, HAVE_MODES) for layer in model.modules()):
        return None
    return "train()" if model.training else "eval()"


def random_state() -> int:
    """A digest of this rank's generators; it draws nothing."""
    state = torch.get_rng_state().numpy().tobytes()
    if torch.cuda.is_initialized():
        state += torch.cuda.get_rng_state().numpy().tobytes()
    return zlib.crc32(state)


def running_statistics(buffers: dict[str, Tensor]) -> list[Tensor]:
    """Mean and variance of the first batch normalisation."""
    for name, mean in buffers.items():
        if name.endswith("running_mean"):
            variance = buffers[name.replace("running_mean", "running_var")]
            return [mean.clone(), variance.clone()]
    return []


def is_mean(node: Any) -> bool:
    """Whether the loss is a mean over samples, or such a mean and more."""
    if node is None:
        return False
    if node.name().startswith(("AddBackward", "SubBackward")):
        return any(is_mean(term) for term, _ in node.next_functions)
    if node.name().startswith("DivBackward"):
        divisor = node._saved_other
        is_one = is_number(divisor) and float(divisor) == 1
        return is_one and is_mean(node.next_functions[0][0])
    if node.name().startswith("MeanBackward"):
        return True
    return getattr(node, "_saved_reduction", 0) == 1


def settings_of(optimizer: Optimizer) -> list[dict[str, str]]:
    return [
        {key: str(float(group[key])) for key in group if is_number(group[key])}
        for group in optimizer.param_groups
    ]


def is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.device.type == "cpu"
    return isinstance(value, int | float)


def sample_of_state(optimizer: Optimizer, named: dict[str, Tensor]) -> Sample:
    return Sample(
        {
            f"{key} of {name}": value
            for name, parameter in named.items()
            for key, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor) and is_whole(value)
            if value.shape in (parameter.shape, ())  # no slice of it
        }
    )
