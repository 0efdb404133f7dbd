"""Replicas: every rank starts from the same parameters and buffers, or says that it does not."""

import hashlib
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from miniddp.process import check_group


class Fingerprint(NamedTuple):
    """What two replicas of one parameter or buffer must share."""

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    requires_grad: bool
    digest: str


def broadcast_module(
    module: nn.Module, process_group: dist.ProcessGroup | None = None, src: int = 0
) -> None:
    """Overwrite the parameters and buffers of every rank, in place, with those of one rank.

    `src` is that rank's number in the group. Shapes and dtypes must be the same on every rank.
    """
    check_group(process_group)
    source = dist.get_global_rank(process_group or _world(), src)
    for _, _, tensor in _tensors(module):
        _broadcast(tensor, source, process_group)


def verify_replicas(
    module: nn.Module, process_group: dist.ProcessGroup | None = None, values: bool = True
) -> None:
    """Raise `ValueError` on every rank unless all ranks hold the same parameters and buffers.

    The error names the first one that differs in name, shape, dtype, kind of device,
    `requires_grad` or value, on which ranks, and by how much. `values=False` leaves values out.
    Costs one exchange of digests, whatever the size of the module.
    """
    check_group(process_group)
    own = [_fingerprint(kind, name, tensor, values) for kind, name, tensor in _tensors(module)]
    gathered: list[list[Fingerprint]] = [[] for _ in range(dist.get_world_size(process_group))]
    dist.all_gather_object(gathered, own, group=process_group)
    _check_devices(gathered[0], dist.get_backend_config(process_group))
    if (difference := _first_difference(gathered)) is None:
        return
    index, field, odd = difference
    ranks = dist.get_process_group_ranks(process_group or _world())
    if field != "digest":
        seen = (f"{_describe(gathered[i], index, field)} on rank {ranks[i]}" for i in [0, *odd])
        raise ValueError(f"replicas differ: {', '.join(seen)}")
    largest = _largest_difference(module, index, ranks[0], process_group)
    raise ValueError(
        f"replicas differ: {own[index].kind} {own[index].name!r} of rank "
        f"{', '.join(str(ranks[i]) for i in odd)} is not that of rank {ranks[0]}, the largest "
        f"absolute difference is {largest:.6g}"
    )


def _tensors(module: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Kind, name and tensor of every parameter and buffer; a tied one once."""
    for name, parameter in module.named_parameters():
        yield "parameter", name, parameter
    for name, buffer in module.named_buffers():
        yield "buffer", name, buffer


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


@torch.no_grad()
def _broadcast(tensor: torch.Tensor, source: int, group: dist.ProcessGroup | None) -> None:
    """Broadcast as bytes, so that any dtype and any memory layout travels."""
    if tensor.numel() == 0:
        return
    data = tensor.detach().contiguous()
    dist.broadcast(_bytes(data), source, group=group)
    tensor.copy_(data)


def _bytes(contiguous: torch.Tensor) -> torch.Tensor:
    return contiguous.reshape(-1).view(torch.uint8)


def _fingerprint(kind: str, name: str, tensor: torch.Tensor, values: bool) -> Fingerprint:
    shape, dtype, device = tuple(tensor.shape), str(tensor.dtype), tensor.device.type
    digest = ""
    if values and device != "meta":
        data = _bytes(tensor.detach().cpu().contiguous()).numpy().data
        digest = hashlib.blake2b(data, digest_size=16).hexdigest()
    return Fingerprint(kind, name, shape, dtype, device, tensor.requires_grad, digest)


def _check_devices(tensors: Sequence[Fingerprint], backends: str) -> None:
    for tensor in tensors:
        if f"{tensor.device}:" not in backends:
            raise ValueError(
                f"{tensor.kind} {tensor.name!r} is on {tensor.device}, for which the process group "
                f"has no backend (it has {backends}): call module.to(device) first"
            )


def _first_difference(
    replicas: Sequence[Sequence[Fingerprint]],
) -> tuple[int, str, list[int]] | None:
    """Index, field and the replicas that differ from the first. All names, then all shapes, …"""
    for field in Fingerprint._fields:
        for index, tensors in enumerate(zip_longest(*replicas)):
            values = [getattr(tensor, field, None) for tensor in tensors]
            if odd := [position for position, value in enumerate(values) if value != values[0]]:
                return index, field, odd
    return None


def _describe(replica: Sequence[Fingerprint], index: int, field: str) -> str:
    """What a replica has at a place of the list of all parameters and buffers."""
    if index >= len(replica):
        return f"no parameter or buffer number {index + 1}"
    tensor = replica[index]
    what = f"{tensor.kind} {tensor.name!r}"
    return what if field in ("kind", "name") else f"{what} with {field}={getattr(tensor, field)}"


def _largest_difference(
    module: nn.Module, index: int, source: int, group: dist.ProcessGroup | None
) -> float:
    """Largest absolute difference of one tensor between the ranks and rank `source`."""
    tensor = list(_tensors(module))[index][2].detach()
    reference = tensor.clone()
    _broadcast(reference, source, group)
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    own = (tensor.to(wide) - reference.to(wide)).abs().max()
    dist.all_reduce(own, dist.ReduceOp.MAX, group=group)
    return float(own)
