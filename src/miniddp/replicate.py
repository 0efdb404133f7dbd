"""Replicas: all ranks start from the same parameters and buffers."""

import hashlib
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from miniddp.bucket import dense_stride
from miniddp.process import Group, check_group

MESSAGE_BYTES = 250 * 2**20
"""Tensors travel together until they have reached this size, as in torch."""

OF_SIZE = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}
"""What gloo and NCCL send, by bytes per element; the bits stay as they are."""

SENT = {
    *OF_SIZE.values(),
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
}


def broadcast_module(
    module: nn.Module,
    process_group: Group = None,
    src: int = 0,
    buffers: bool = True,
) -> None:
    """Overwrite parameters, and `buffers`, with those of rank `src`, in place.

    `src` counts within the group. Shapes and dtypes must agree on all ranks.
    """
    tensors = [tensor for _, tensor in named_tensors(module, buffers)]
    broadcast_coalesced(tensors, process_group, src)


@torch.no_grad()
def broadcast_coalesced(
    tensors: Iterable[Tensor], process_group: Group = None, src: int = 0
) -> None:
    """Overwrite `tensors` with those of rank `src`, in a few messages.

    Any dtype and any strides travel; gaps between elements stay as they are.
    """
    check_group(process_group)
    # .data: backward may still want the module as it was in forward
    filled = [sendable(tensor.data) for tensor in tensors if tensor.numel()]
    if not filled:
        return
    torch_dist: Any = dist
    group = process_group or dist.group.WORLD
    torch_dist._broadcast_coalesced(group, filled, MESSAGE_BYTES, src)


def sendable(tensor: Tensor) -> Tensor:
    """A view of its elements, each once, in a dtype that backends know."""
    strides = tensor.stride()
    if 0 in strides and not tensor.is_sparse:  # an expanded tensor
        once = tuple(slice(None) if stride else 0 for stride in strides)
        tensor = tensor[once]
    if tensor.dtype in SENT:
        return tensor
    return tensor.view(OF_SIZE[tensor.itemsize])


def verify_replicas(
    module: nn.Module,
    process_group: Group = None,
    values: bool = True,
    buffers: bool = True,
    also: Sequence[str] = (),
) -> None:
    """Raise `ValueError` on every rank unless the ranks hold equal replicas.

    The error names the first parameter or buffer that differs in name, shape,
    layout, dtype, device type, `requires_grad` or values; or that is sparse or
    of a lazy module. Only digests (#…) travel. The lines of `also` must agree.
    """
    check_group(process_group)
    group = process_group or dist.group.WORLD
    ranks = dist.get_process_group_ranks(group)
    tensors = named_tensors(module, buffers)
    fingerprints = [
        _fingerprint(name, tensor, values) for name, tensor in tensors
    ]
    mine = [*also, *fingerprints]
    replicas = [mine] * len(ranks)
    device_of = next(module.parameters(), torch.empty(0))
    with torch.cuda.device_of(device_of):
        dist.all_gather_object(replicas, mine, group=group)
    for lines in zip_longest(*replicas, fillvalue="nothing"):
        for rank, line in zip(ranks, lines, strict=True):
            if line != lines[0]:
                both = f"{lines[0]} on rank {ranks[0]}, {line} on rank {rank}"
                raise ValueError(f"replicas differ: {both}")
    for name, tensor in tensors:
        check_dense(name, tensor)
    backends = dist.get_backend_config(group)
    for name, parameter in module.named_parameters():
        if f"{parameter.device.type}:" not in backends:
            raise ValueError(
                f"parameter {name!r} is on {parameter.device}, but the process "
                f"group only has {backends}: call module.to(device) first"
            )


def named_tensors(
    module: nn.Module, buffers: bool = True
) -> list[tuple[str, Tensor]]:
    """Parameters, and `buffers`."""
    named_buffers = module.named_buffers() if buffers else ()
    return [*module.named_parameters(), *named_buffers]


def check_dense(name: str, tensor: Tensor) -> None:
    """Raise `ValueError` for what has no elements yet, or not all of them."""
    if is_lazy(tensor):
        raise ValueError(
            f"{name!r} has no shape yet: its module is lazy, so run a forward "
            "pass on every rank before you wrap it"
        )
    dense_only = "replicas hold dense parameters and buffers only"
    if tensor.is_quantized:
        raise ValueError(f"{name!r} is quantized: {dense_only}")
    if tensor.is_nested:
        raise ValueError(f"{name!r} is nested: {dense_only}")
    if tensor.layout != torch.strided:
        raise ValueError(f"{name!r} is sparse ({tensor.layout}): {dense_only}")


def _fingerprint(name: str, tensor: Tensor, values: bool) -> str:
    kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
    return f"{kind} {name!r} ({_about(tensor, values)})"


def _about(tensor: Tensor, values: bool) -> str:
    if is_lazy(tensor):
        return "of a lazy module, no shape yet"
    if tensor.is_nested:
        return "nested"
    about = f"{tuple(tensor.shape)} {tensor.dtype} {tensor.device.type}"
    about += " trained" if tensor.requires_grad else ""
    if tensor.layout != torch.strided:
        return f"{about} {tensor.layout}"
    if isinstance(tensor, nn.Parameter):
        about += _order_in_memory(tensor)
    if values and not tensor.is_meta:
        flat = tensor.detach().contiguous().reshape(-1)
        data = flat.view(torch.uint8).cpu().numpy().data
        about += f" #{hashlib.blake2b(data, digest_size=8).hexdigest()}"
    return about


def _order_in_memory(parameter: Tensor) -> str:
    """The strides, unless memory is in the order of the dimensions.

    Gradients lie in a bucket as parameters in memory: ranks must agree in it.
    The stride of a dimension of size 1 means nothing.
    """
    strides = [
        stride
        for stride, size in zip(
            dense_stride(parameter), parameter.shape, strict=True
        )
        if size > 1
    ]
    if strides == sorted(strides, reverse=True):
        return ""
    return f" strides {tuple(strides)}"
