"""What `DistributedDataParallel` refuses, each with a sentence."""

import warnings
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]

NOT_HERE = (
    "static_graph delay_all_reduce_named_params param_to_hook_all_reduce "
    "mixed_precision device_mesh skip_all_reduce_unused_params "
    "bucket_cap_mb_list batched_grad_copy"
)

CURES = (
    "Cure it by making sure all `forward` function outputs participate in "
    "calculating loss, by freezing what is unused before wrapping, or by "
    "passing the keyword argument `find_unused_parameters=True`."
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


def check_module(
    module: nn.Module,
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> None:
    """Raise as torch for a module that cannot be wrapped so."""
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
        if isinstance(wanted, int):
            wanted = torch.device("cuda", wanted)
        if wanted is not None and devices != {torch.device(wanted)}:
            raise ValueError(
                "device_ids and output_device must name the one GPU of the "
                f"module, but got {device_ids} and {output_device} for "
                f"parameters on {', '.join(sorted(map(str, devices)))}."
            )


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


def check_gradient(
    name: str, parameter: torch.Tensor, view: torch.Tensor, is_ready: bool
) -> None:
    """Raise `RuntimeError` if a gradient cannot travel in its bucket."""
    if is_ready:
        raise RuntimeError(
            f"Expected to mark a variable ready only once: {name!r} got its "
            "gradient twice in one backward pass, from a re-entrant checkpoint "
            "(pass use_reentrant=False) or outside of forward."
        )
    if torch.is_grad_enabled():
        raise RuntimeError(
            "DistributedDataParallel does not work with create_graph=True"
        )
    gradient = parameter.grad
    if gradient is not None and gradient.layout != torch.strided:
        raise RuntimeError(
            f"gradient of {name!r} is sparse: buckets hold dense gradients "
            "only; use sparse=False in the embedding"
        )
    if (parameter.dtype, parameter.device) != (view.dtype, view.device):
        raise RuntimeError(
            f"{name!r} is {parameter.dtype} on {parameter.device}, its bucket "
            f"{view.dtype} on {view.device}: move the module, then wrap it"
        )


def not_finished(names: Sequence[str], ready: Container[int]) -> RuntimeError:
    """The error of a forward pass after a backward that left gradients out."""
    missing = [name for i, name in enumerate(names) if i not in ready]
    return RuntimeError(
        "Expected to have finished reduction in the prior iteration before "
        "starting a new one: parameters which did not receive grad for rank "
        f"{dist.get_rank()}: {shortened(missing)}. {CURES}"
    )


def left_out(
    names: Sequence[str], counts: Sequence[int], world_size: int
) -> RuntimeError:
    """The error of a backward pass that left gradients out on some rank."""
    missing = [
        f"{name!r} (on {world_size - count} of {world_size} ranks)"
        for name, count in zip(names, counts, strict=True)
        if count < world_size
    ]
    return RuntimeError(
        f"{len(missing)} parameter(s) got no gradient in this backward pass: "
        f"{shortened(missing)}. {CURES}"
    )


def shortened(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (", …" if len(names) > 10 else "")


def check_default_group(process_group: dist.ProcessGroup | None) -> None:
    """Raise `RuntimeError` for a wrapper that cannot be copied or pickled."""
    if process_group is not dist.group.WORLD:
        raise RuntimeError(
            "DDP Pickling/Unpickling are only supported when using DDP with "
            "the default process group: copy its module and wrap the copy"
        )
