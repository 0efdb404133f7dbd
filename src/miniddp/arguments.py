"""What the collectives of `miniddp.ring` accept, and how a tensor gets where it can be sent."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

OPS = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)


@contextmanager
def reachable(group: ProcessGroup | None, *tensors: Tensor) -> Iterator[list[Tensor]]:
    """The tensors, or copies in host memory, copied back at the end: gloo only sends from there."""
    device = tensors[0].device.type
    local = [tensor.detach() for tensor in tensors]
    if device == "cpu" or f"{device}:gloo" not in dist.get_backend_config(group):
        yield local
        return
    on_host = [tensor.cpu() for tensor in local]
    yield on_host
    for tensor, copy in zip(local, on_host, strict=True):
        tensor.copy_(copy)


def equal_parts(name: str, whole: Tensor, part: Tensor, world_size: int) -> list[Tensor]:
    if whole.numel() != world_size * part.numel():
        raise ValueError(
            f"{name} must have {world_size} x {part.numel()} elements for {world_size} ranks, "
            f"not {whole.numel()}"
        )
    return list(whole.view(world_size, part.numel()).unbind())


def check_tensors(*tensors: Tensor) -> None:
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"expected a torch.Tensor, not {type(tensor).__name__}")
        if tensor.layout != torch.strided or not tensor.is_contiguous():
            raise ValueError("Tensors must be contiguous (and dense, not sparse)")


def check_list(name: str, tensors: Sequence[Tensor], like: Tensor, world_size: int) -> None:
    if len(tensors) != world_size:
        raise ValueError(f"{name} must hold one tensor per rank ({world_size}), not {len(tensors)}")
    for index, tensor in enumerate(tensors):
        if (tensor.shape, tensor.dtype, tensor.device) != (like.shape, like.dtype, like.device):
            raise ValueError(
                f"{name}[{index}] is {describe(tensor)}, but its counterpart is {describe(like)}"
            )


def check_op(op: ReduceOp.RedOpType, tensor: Tensor) -> None:
    if op not in OPS:
        raise ValueError(f"op must be SUM, AVG, PRODUCT, MIN or MAX, not {op}")
    if tensor.is_complex() and op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise ValueError(f"all_reduce does not support {op} on complex tensors")
    if op == ReduceOp.AVG and not (tensor.is_floating_point() or tensor.is_complex()):
        raise RuntimeError(f"AVG needs floating point numbers, not {tensor.dtype}")


def describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
