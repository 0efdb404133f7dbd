"""Replicas: all ranks start from the same parameters and buffers."""

import hashlib
from collections.abc import Iterable, Iterator
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn

from miniddp.bucket import MIB, plan_buckets
from miniddp.process import Group, check_group


def broadcast_module(
    module: nn.Module,
    process_group: Group = None,
    src: int = 0,
    buffers: bool = True,
) -> None:
    """Overwrite parameters, and `buffers`, with those of rank `src`, in place.

    `src` counts within the group. Shapes and dtypes must agree on all ranks.
    """
    tensors = [*module.parameters(), *(module.buffers() if buffers else ())]
    broadcast_coalesced(tensors, process_group, src)


@torch.no_grad()
def broadcast_coalesced(
    tensors: Iterable[Tensor], process_group: Group = None, src: int = 0
) -> None:
    """Overwrite `tensors` with those of rank `src`, in a few messages.

    Any dtype and any strides travel; gaps between elements stay as they are.
    """
    check_group(process_group)
    tensors = [tensor for tensor in tensors if tensor.numel()]
    sizes = [tensor.nbytes for tensor in tensors]
    kinds = [(tensor.dtype, tensor.device) for tensor in tensors]
    plan = plan_buckets(sizes, kinds, range(len(sizes)), 250 * MIB, 250 * MIB)
    for indices in plan:
        message = [tensors[i] for i in indices]
        flat = torch.cat([tensor.reshape(-1) for tensor in message])
        data = flat.view(torch.uint8)  # a backend need not know the dtype
        dist.broadcast(data, group=process_group, group_src=src)
        parts = torch.split(flat, [tensor.numel() for tensor in message])
        for tensor, part in zip(message, parts, strict=True):
            once = tuple(slice(None if s else 1) for s in tensor.stride())
            # .data: backward may still want the module as it was in forward
            tensor.data[once].copy_(part.view(tensor.shape)[once])


def verify_replicas(
    module: nn.Module, process_group: Group = None, values: bool = True
) -> None:
    """Raise `ValueError` on every rank unless the ranks hold equal replicas.

    The error names the first parameter or buffer that differs in name, shape,
    dtype, device type, `requires_grad` or values. Only digests (#…) travel.
    """
    check_group(process_group)
    group = process_group or dist.group.WORLD
    ranks = dist.get_process_group_ranks(group)
    own = list(_fingerprints(module, values))
    replicas = [own] * len(ranks)
    where = next(module.parameters(), torch.empty(0))
    with torch.cuda.device_of(where):  # type: ignore[no-untyped-call]
        dist.all_gather_object(replicas, own, group=group)
    for lines in zip_longest(*replicas, fillvalue="nothing"):
        for rank, line in zip(ranks, lines, strict=True):
            if line != lines[0]:
                both = f"{lines[0]} on rank {ranks[0]}, {line} on rank {rank}"
                raise ValueError(f"replicas differ: {both}")
    backends = dist.get_backend_config(group)
    for name, parameter in module.named_parameters():
        if f"{parameter.device.type}:" not in backends:
            raise ValueError(
                f"parameter {name!r} is on {parameter.device}, but the process "
                f"group only has {backends}: call module.to(device) first"
            )


def _fingerprints(module: nn.Module, values: bool) -> Iterator[str]:
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
        about = f"{tuple(tensor.shape)} {tensor.dtype} {tensor.device.type}"
        about += " trained" if tensor.requires_grad else ""
        if values and not tensor.is_meta:
            flat = tensor.detach().contiguous().reshape(-1)
            data = flat.view(torch.uint8).cpu().numpy().data
            about += f" #{hashlib.blake2b(data, digest_size=8).hexdigest()}"
        yield f"{kind} {name!r} ({about})"
