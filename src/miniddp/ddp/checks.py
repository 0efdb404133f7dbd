"""What `DistributedDataParallel` refuses, each with a sentence."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from miniddp.bucket import Bucket
from miniddp.process import Group
from miniddp.replicate import check_dense, verify_replicas

NOT_HERE = (
    "static_graph delay_all_reduce_named_params param_to_hook_all_reduce "
    "mixed_precision device_mesh skip_all_reduce_unused_params "
    "bucket_cap_mb_list batched_grad_copy"
)

IGNORED = "_ddp_params_and_buffers_to_ignore"
"""Names that torch's class reads from the module, and leaves out."""

NO_JOIN = (
    "miniddp's DistributedDataParallel has no join: give every rank as many "
    "batches (DistributedSampler), or use torch's class"
)


def refuse_options(options: Mapping[str, Any]) -> None:
    """Raise `NotImplementedError` for an option that only torch has."""
    for name in NOT_HERE.split():
        if options[name]:
            raise NotImplementedError(
                f"miniddp's DistributedDataParallel has no {name}: "
                "leave it out, or use torch's class"
            )


def buffer_sync(
    broadcast: bool | None, forward: bool | None
) -> tuple[bool, bool]:
    """Whether buffers are copied at the start, and in forward, as in torch."""
    if broadcast is not None:
        warnings.warn(
            "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` "
            "instead, which copies buffers at the start also when False.",
            FutureWarning,
            stacklevel=3,
        )
    if forward is not None:
        return True, forward
    return broadcast is not False, broadcast is not False


def check_alike(
    module: nn.Module, group: Group, buffers: bool, options: Sequence[str]
) -> None:
    """Raise `ValueError` on every rank unless all will send the same."""
    try:
        verify_replicas(
            module, group, values=False, buffers=buffers, also=options
        )
    except ValueError as error:
        raise ValueError(
            f"{error}; build, load and convert the module alike on every rank, "
            "then wrap it with the same options"
        ) from None


def check_module(
    module: nn.Module,
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> None:
    """Raise for a module that cannot be wrapped so, where torch can, as it."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "a module that is wrapped in inference_mode cannot be trained: "
            "wrap it outside"
        )
    if getattr(module, IGNORED, None):
        raise NotImplementedError(
            f"miniddp's DistributedDataParallel has no {IGNORED}: "
            "freeze these parameters, or use torch's class"
        )
    for name, parameter in module.named_parameters():
        check_dense(name, parameter)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have "
            "any parameter that requires a gradient."
        )
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(
            "device_ids can only be None or contain a single element."
        )
    devices = {parameter.device for parameter in module.parameters()}
    for wanted in [*(device_ids or ()), output_device]:
        if wanted is not None and devices != {gpu(wanted)}:
            raise ValueError(
                "device_ids and output_device must name the one GPU of the "
                f"module, but got {device_ids} and {output_device} for "
                f"parameters on {', '.join(sorted(map(str, devices)))}."
            )


def gpu(wanted: int | str | torch.device) -> torch.device | None:
    """The GPU that is meant, with its number; None if it is no GPU."""
    if isinstance(wanted, int):
        return torch.device("cuda", wanted)
    device = torch.device(wanted)
    if device.type != "cuda":
        return None
    if device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def check_hook(hook: Any, registered: Any) -> None:
    """Raise as torch for what is no hook, and for a second one."""
    if not callable(hook):
        raise TypeError("Communication hook must be callable.")
    if registered:
        raise RuntimeError("register_comm_hook can only be called once.")
    notes = getattr(hook, "__annotations__", {})
    if notes.get("bucket", GradBucket) != GradBucket:
        raise ValueError(
            "Communication hook: bucket annotation should be dist.GradBucket."
        )
    future = torch.futures.Future[torch.Tensor]
    if notes.get("return", future) != future:
        raise ValueError(
            "Communication hook: return annotation should be "
            "torch.futures.Future[torch.Tensor]."
        )


def check_parameter(
    name: str,
    parameter: torch.Tensor,
    kind: tuple[torch.dtype, torch.device],
    is_there: bool,
) -> None:
    """Raise `RuntimeError` for one replaced, converted or moved since wrapping.

    Its gradients would not come to the reducer. `is_there`: in the module,
    perhaps under another name, as after pruning.
    """
    if not is_there:
        raise RuntimeError(
            f"{name!r} is no longer the parameter that was wrapped, after "
            "load_state_dict(assign=True), say: change the module, then wrap it"
        )
    if (parameter.dtype, parameter.device) != kind:
        raise RuntimeError(
            f"{name!r} is {parameter.dtype} on {parameter.device}, but was "
            f"{kind[0]} on {kind[1]} when it was wrapped: convert the module, "
            "then wrap it"
        )


def check_frozen(frozen: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise `RuntimeError` for a parameter that is trained only since."""
    for name, parameter in frozen:
        if parameter.requires_grad:
            raise RuntimeError(
                f"{name!r} did not require a gradient when it was wrapped, so "
                "nobody would average it: unfreeze the module, then wrap it"
            )


def check_gradients(
    names: Sequence[str], bucket: Bucket, gradients: Sequence[torch.Tensor]
) -> None:
    """Raise `RuntimeError` if one of them cannot travel in the bucket."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "DistributedDataParallel does not work with create_graph=True: "
            "take gradients of gradients with torch.autograd.grad"
        )
    dtype = bucket.buffer().dtype
    kinds = {(gradient.dtype, gradient.layout) for gradient in gradients}
    if kinds == {(dtype, torch.strided)}:
        return
    for i, gradient in zip(bucket.indices, gradients, strict=True):
        if gradient.layout != torch.strided:
            raise RuntimeError(
                f"gradient of {names[i]!r} is sparse: buckets hold dense "
                "gradients only; use sparse=False in the embedding"
            )
        if gradient.dtype != dtype:
            raise RuntimeError(
                f"gradient of {names[i]!r} is {gradient.dtype}, its parameter "
                f"was {dtype} when it was wrapped: gradients need the dtype of "
                "their parameters"
            )


def check_default_group(process_group: dist.ProcessGroup | None) -> None:
    """Raise `RuntimeError` for a wrapper that cannot be copied or pickled."""
    if process_group is not dist.group.WORLD:
        raise RuntimeError(
            "DDP Pickling/Unpickling are only supported when using DDP with "
            "the default process group: copy its module and wrap the copy"
        )
