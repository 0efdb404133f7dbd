"""`FullyShardedModule`, ZeRO stage 3: a rank keeps 1/N of the parameters."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import ReduceOp
from torch.nn import functional as F
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from miniddp import ring
from miniddp.process import Group, check_group
from miniddp.replicate import broadcast_coalesced, verify_replicas
from miniddp.zero.optimizer import to_host

IN_UNIT = "_in_unit"
"""What marks a parameter, and the module that had it, as taken by a unit."""


class Gather(torch.autograd.Function):
    """All-gather in forward; in backward its transpose, reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, unit: "FullyShardedModule") -> Tensor:
        ctx.unit = unit
        return unit.gather()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.unit.reduce_scatter(gradient), None


class ShardGradient(Tensor):
    """A rank's part of a gradient. It refuses a norm, which differs by rank."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") in NORMS:
            raise RuntimeError(
                "this gradient is one rank's shard, so each rank would get "
                "another norm: call clip_grad_norm_ of the FullyShardedModule"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


NORMS = ("norm", "linalg_norm", "linalg_vector_norm", "_foreach_norm")


def mark_gradient(shard: Tensor) -> None:
    """What autograd calls when it has added to the gradient of `shard`."""
    if shard.grad is not None and not isinstance(shard.grad, ShardGradient):
        shard.grad = shard.grad.as_subclass(ShardGradient)


class Place(NamedTuple):
    """Where in a unit there is a parameter."""

    module: nn.Module
    name: str  # in `module`
    path: str  # in the unit


class Slot(NamedTuple):
    """A parameter in the flat vector; a tied one has several places."""

    shape: torch.Size
    places: list[Place]


class FullyShardedModule(nn.Module):
    """Spread the parameters of `module` over the ranks; gather them for use.

    The parameters become one flat vector, padded with zeros to a multiple of N;
    rank r keeps the r-th part of it as its only parameter, `shard`. Forward
    gathers the whole vector and drops it; backward gathers it again, and leaves
    in `shard.grad` this rank's part of the mean gradient. With
    `reshard_after_forward=False` the whole vector stays from forward until
    backward: two transfers of the parameters instead of three, for more memory.

    What is gathered at a time is a unit. Wrap each layer, then the whole model:
    a wrapper leaves out what wrappers inside it hold. All ranks must call the
    units in the same order. Parameters and buffers start as rank 0's, and
    buffers are not synchronised again. Load a whole state before you wrap.
    `torch.utils.checkpoint` must be around a unit, drops what was gathered, and
    needs `reshard_after_forward=False`. Communication is not overlapped.

    A rank sees its part of the gradients only. Any optimizer works that treats
    each element by itself. Clip with `clip_grad_norm_` of this class: torch's
    function would take the norm of one shard, so the gradients refuse it with
    a `RuntimeError`. A `GradScaler` would skip a step on one rank only: use
    `torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler`. Autocast's
    copies of the weights (2 bytes per parameter) live until backward, as under
    DDP.

    Raises `RuntimeError` without a process group; `ValueError` if the ranks
    pass different modules, if there is no parameter, if one is in another unit
    already, or if those of a unit differ in dtype, device or `requires_grad`.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Group = None,
        reshard_after_forward: bool = True,
    ) -> None:
        super().__init__()
        check_group(process_group)
        verify_replicas(module, process_group, values=False)
        self._wrapped = module
        self.process_group = process_group
        self.reshard_after_forward = reshard_after_forward
        self._world_size = dist.get_world_size(process_group)
        self._whole: Tensor | None = None
        self._slots: list[Slot] = []
        self.shard = self._take_parameters()
        if next(self.parameters(), None) is None:
            raise ValueError(f"{type(module).__name__} has no parameter")
        broadcast_coalesced(list(module.buffers()), process_group)

    @property
    def module(self) -> nn.Module:
        """What was wrapped."""
        return self._wrapped

    def _take_parameters(self) -> nn.Parameter | None:
        """This rank's part of rank 0's; None if units inside hold all."""
        slots: dict[nn.Parameter, Slot] = {}
        for place, parameter in _parameters_outside_units(self.module):
            _check(place.path, parameter, next(iter(slots), parameter))
            slot = slots.setdefault(parameter, Slot(parameter.shape, []))
            slot.places.append(place)
        if not slots:
            return None
        flat = torch.cat([p.detach().reshape(-1) for p in slots])
        whole = F.pad(flat, (0, -len(flat) % self._world_size))
        broadcast_coalesced([whole], self.process_group)
        for parameter, slot in slots.items():
            setattr(parameter, IN_UNIT, True)
            for place in slot.places:
                setattr(place.module, IN_UNIT, True)
        self._slots = list(slots.values())
        self._place(None)
        part = whole.chunk(self._world_size)[dist.get_rank(self.process_group)]
        shard = nn.Parameter(part.clone(), next(iter(slots)).requires_grad)
        if shard.requires_grad:
            shard.register_post_accumulate_grad_hook(mark_gradient)
        return shard

    def _place(self, whole: Tensor | None) -> None:
        """Give the modules their parts of `whole`, or None, as attributes."""
        nothing = [None] * len(self._slots)
        views = nothing if whole is None else self._split(whole)
        for slot, view in zip(self._slots, views, strict=True):
            for module, name, _ in slot.places:
                module._parameters.pop(name, None)
                setattr(module, name, view)  # where a list of weights sees it
                module._parameters[name] = view  # type: ignore[assignment]

    def _split(self, whole: Tensor) -> list[Tensor]:
        """A view per slot; one split, so that backward builds one gradient."""
        sizes = [slot.shape.numel() for slot in self._slots]
        *views, _ = torch.split(whole, [*sizes, len(whole) - sum(sizes)])
        slots = zip(views, self._slots, strict=True)
        return [view.view(slot.shape) for view, slot in slots]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.shard is None:
            return self.module(*args, **kwargs)
        self._whole = None
        whole = Gather.apply(self.shard, self)  # type: ignore[no-untyped-call]
        self._place(whole)
        try:
            with self._saving(whole, self.shard):
                return self.module(*args, **kwargs)
        finally:
            self._place(None)

    def gather(self) -> Tensor:
        """The whole flat vector of this unit. Every rank must call it."""
        assert self.shard is not None
        whole = self.shard.new_empty(len(self.shard) * self._world_size)
        chunks = whole.chunk(self._world_size)
        ring.all_gather(chunks, self.shard, self.process_group)
        return whole

    def reduce_scatter(self, gradient: Tensor) -> Tensor:
        """This rank's part of the mean gradient of the whole flat vector."""
        self._whole = None  # backward through this unit is over
        chunks = gradient.chunk(self._world_size)
        part = torch.empty_like(chunks[0])
        ring.reduce_scatter(part, chunks, ring.AVG, self.process_group)
        return part

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2) -> Tensor:
        """Scale the gradients where their common norm is above `max_norm`.

        Every rank must call it, on the outermost unit, and gets the norm that
        the whole gradient had. `norm_type` is positive, perhaps `math.inf`.
        """
        if not norm_type > 0:
            raise ValueError(f"norm_type must be positive, not {norm_type}")
        shards = list(self.parameters())
        gradients = [p.grad for p in shards if p.grad is not None]
        plain = [gradient.as_subclass(Tensor) for gradient in gradients]
        local = get_total_norm(plain, norm_type)
        norm = local.to(shards[0].device, torch.float64)
        if norm_type == math.inf:
            dist.all_reduce(norm, ReduceOp.MAX, self.process_group)
        else:
            norm = norm**norm_type
            dist.all_reduce(norm, group=self.process_group)
            norm = norm ** (1 / norm_type)
        clip_grads_with_norm_(shards, max_norm, norm)
        return norm.to(local.dtype)

    def _saving(
        self, whole: Tensor, shard: nn.Parameter
    ) -> AbstractContextManager[Any]:
        """Within it autograd saves a part of `whole` as its place there."""
        if not (self.reshard_after_forward and shard.requires_grad):
            return nullcontext()
        address = whole.untyped_storage().data_ptr()
        version = shard._version

        def pack(saved: Tensor) -> Any:
            strided = saved.layout == torch.strided
            if not strided or saved.untyped_storage().data_ptr() != address:
                return saved
            return saved.size(), saved.stride(), saved.storage_offset()

        def unpack(saved: Any) -> Tensor:
            if isinstance(saved, Tensor):
                return saved
            if version != shard._version:
                raise RuntimeError(
                    "the parameters of a FullyShardedModule changed between "
                    "forward and backward: step after backward"
                )
            if self._whole is None:
                self._whole = self.gather()
            return self._whole.as_strided(*saved)

        return saved_tensors_hooks(pack, unpack)

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Any]:
        """The `state_dict()` of the unwrapped module, in host memory.

        Every rank must call it, and gets it. `state_dict()` has its own shards.
        """
        shards = dict(self.named_parameters(remove_duplicate=False))
        state = {k: v for k, v in self.state_dict().items() if k not in shards}
        for path, unit in self.named_modules(remove_duplicate=False):
            if isinstance(unit, FullyShardedModule) and unit.shard is not None:
                views = unit._split(unit.gather().cpu())
                for slot, view in zip(unit._slots, views, strict=True):
                    for place in slot.places:
                        state[f"{path}.{place.path}"] = view.clone()
        return to_host({_unwrapped(k): value for k, value in state.items()})


def _unwrapped(path: str) -> str:
    names = [name for name in path.split(".") if name not in ("", "_wrapped")]
    return ".".join(names)


def _parameters_outside_units(
    module: nn.Module, path: str = ""
) -> Iterator[tuple[Place, nn.Parameter]]:
    """Every place of a parameter that no unit inside `module` holds."""
    if hasattr(module, IN_UNIT):
        raise ValueError(
            f"{type(module).__name__} {path[:-1]!r} is in another unit "
            "already: use that unit in every place of the module"
        )
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield Place(module, name, f"{path}{name}"), parameter
    for name, child in module._modules.items():
        if child is not None and not isinstance(child, FullyShardedModule):
            yield from _parameters_outside_units(child, f"{path}{name}.")


def _check(path: str, parameter: nn.Parameter, first: nn.Parameter) -> None:
    if hasattr(parameter, IN_UNIT):
        raise ValueError(
            f"parameter {path!r} is tied to one that is in another unit "
            "already: wrap both places of a tied parameter in the same unit"
        )
    for field in ("dtype", "device", "requires_grad"):
        found = getattr(parameter, field)
        wanted = getattr(first, field)
        if found != wanted:
            raise ValueError(
                f"parameter {path!r} has {field}={found}, the unit's first has "
                f"{field}={wanted}: wrap its layer as a unit of its own"
            )
