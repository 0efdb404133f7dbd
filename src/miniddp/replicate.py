"""Replicas: all ranks start from the same parameters and buffers."""

import hashlib
from collections.abc import Iterator, Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn

from miniddp.process import check_group

MESSAGE_BYTES = 250 * 2**20
Group = dist.ProcessGroup | None


def broadcast_module(
    module: nn.Module,
    process_group: Group = None,
    src: int = 0,
    buffers: bool = True,
) -> None:
    """Overwrite parameters, and `buffers`, with those of rank `src`, in place.

    `src` counts within the group. Shapes and dtypes must agree on all ranks.
    """
    tensors: list[Tensor] = [*module.parameters()]
    if buffers:
        tensors += module.buffers()
    broadcast_coalesced(tensors, process_group, src)


@torch.no_grad()
def broadcast_coalesced(
    tensors: Sequence[Tensor], process_group: Group = None, src: int = 0
) -> None:
    """Overwrite `tensors` with those of rank `src`, in few messages of bytes.

    Any dtype and any strides travel; gaps between elements stay as they are.
    """
    check_group(process_group)
    for message in _messages(tensors):
        data = torch.cat([_bytes(tensor) for tensor in message])
        dist.broadcast(data, group=process_group, group_src=src)
        parts = torch.split(data, [tensor.nbytes for tensor in message])
        for tensor, part in zip(message, parts, strict=True):
            # clone: a dtype's view must begin at a multiple of its size
            new = part.clone().view(tensor.dtype).view(tensor.shape)
            # what is expanded (stride 0) is written once
            once = tuple(slice(None if s else 1) for s in tensor.stride())
            # data: backward may still want the module as it was in forward
            tensor.data[once].copy_(new[once])


def _messages(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one device that travel together, the message bounded."""
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        message: list[Tensor] = []
        for tensor in tensors:
            if tensor.device != device or tensor.numel() == 0:
                continue
            size = sum(t.nbytes for t in message) + tensor.nbytes
            if message and size > MESSAGE_BYTES:
                yield message
                message = []
            message.append(tensor)
        if message:
            yield message


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def verify_replicas(
    module: nn.Module, process_group: Group = None, values: bool = True
) -> None:
    """Raise `ValueError` on every rank unless the ranks hold equal replicas.

    The error names the first parameter or buffer that differs in name, shape,
    dtype, kind of device, `requires_grad` or, with `values`, in any bit. Only
    digests (#…) travel, whatever the size of the module.
    """
    check_group(process_group)
    group = process_group or dist.group.WORLD
    ranks = dist.get_process_group_ranks(group)
    own = list(_fingerprints(module, values))
    replicas = [own for _ in ranks]
    where = next(module.parameters(), torch.empty(0))
    with torch.cuda.device_of(where):  # type: ignore[no-untyped-call]
        dist.all_gather_object(replicas, own, group=process_group)
    for tensors in zip_longest(*replicas, fillvalue="nothing"):
        for rank, tensor in zip(ranks, tensors, strict=True):
            if tensor != tensors[0]:
                raise ValueError(
                    f"replicas differ: {tensors[0]} on rank {ranks[0]}, "
                    f"{tensor} on rank {rank}"
                )
    backends = dist.get_backend_config(group)
    for name, parameter in module.named_parameters():
        if f"{parameter.device.type}:" not in backends:
            raise ValueError(
                f"parameter {name!r} is on {parameter.device}, for which the "
                f"process group has no backend (it has {backends}): call "
                "module.to(device) first"
            )


def _fingerprints(module: nn.Module, values: bool) -> Iterator[str]:
    named = [
        *(("parameter", *each) for each in module.named_parameters()),
        *(("buffer", *each) for each in module.named_buffers()),
    ]
    for kind, name, tensor in named:
        about = f"{tuple(tensor.shape)} {tensor.dtype} {tensor.device.type}"
        if tensor.requires_grad:
            about += " trained"
        if values and not tensor.is_meta:
            data = _bytes(tensor).cpu().numpy().data
            about += f" #{hashlib.blake2b(data, digest_size=8).hexdigest()}"
        yield f"{kind} {name!r} ({about})"
