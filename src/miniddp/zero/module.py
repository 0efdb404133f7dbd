"""`FullyShardedModule`, ZeRO stage 3: a rank keeps 1/N of the parameters."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

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


class Slot(NamedTuple):
    """A parameter in the flat vector; a tied one has several places."""

    shape: torch.Size
    places: list[tuple[str, nn.Module, str]]  # path, module, name there


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
    each element by itself. A norm needs a sum over the ranks. A `GradScaler`
    would skip a step on one rank only: use `torch.distributed.fsdp.
    sharded_grad_scaler.ShardedGradScaler`. Autocast's copies of the weights (2
    bytes per parameter) live until backward, as under DDP.

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
        for path, owner, name, parameter in _own_parameters(self.module):
            _check(path + name, parameter, next(iter(slots), parameter))
            slot = slots.setdefault(parameter, Slot(parameter.shape, []))
            slot.places.append((path, owner, name))
        if not slots:
            return None
        whole = torch.cat([each.detach().reshape(-1) for each in slots])
        whole = F.pad(whole, (0, -len(whole) % self._world_size))
        broadcast_coalesced([whole], self.process_group)
        for parameter, slot in slots.items():
            setattr(parameter, IN_UNIT, True)
            for _, owner, _ in slot.places:
                setattr(owner, IN_UNIT, True)
        self._slots = list(slots.values())
        self._place(None)
        own = whole.chunk(self._world_size)[dist.get_rank(self.process_group)]
        return nn.Parameter(own.clone(), next(iter(slots)).requires_grad)

    def _place(self, whole: Tensor | None) -> None:
        """Give the modules their parts of `whole`, or None, as attributes."""
        nothing = [None] * len(self._slots)
        views = nothing if whole is None else self._split(whole)
        for slot, view in zip(self._slots, views, strict=True):
            for _, owner, name in slot.places:
                owner._parameters.pop(name, None)
                setattr(owner, name, view)  # where a list of weights sees it
                owner._parameters[name] = view  # type: ignore[assignment]

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
        own = torch.empty_like(chunks[0])
        ring.reduce_scatter(own, chunks, ring.AVG, self.process_group)
        return own

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
                    for inner, _, name in slot.places:
                        state[f"{path}.{inner}{name}"] = view.clone()
        return to_host({_unwrapped(k): value for k, value in state.items()})


def _unwrapped(name: str) -> str:
    parts = name.split(".")
    return ".".join(part for part in parts if part not in ("", "_wrapped"))


def _own_parameters(
    module: nn.Module, path: str = ""
) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Every place of a parameter that no unit inside holds."""
    if hasattr(module, IN_UNIT):
        raise ValueError(
            f"{type(module).__name__} {path[:-1]!r} is in another unit "
            "already: use that unit in every place of the module"
        )
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield path, module, name, parameter
    for name, child in module._modules.items():
        if child is not None and not isinstance(child, FullyShardedModule):
            yield from _own_parameters(child, f"{path}{name}.")


def _check(name: str, parameter: nn.Parameter, first: nn.Parameter) -> None:
    if hasattr(parameter, IN_UNIT):
        raise ValueError(
            f"parameter {name!r} is tied to one that is in another unit "
            "already: wrap both places of a tied parameter in the same unit"
        )
    for field in ("dtype", "device", "requires_grad"):
        own, wanted = getattr(parameter, field), getattr(first, field)
        if own != wanted:
            raise ValueError(
                f"parameter {name!r} has {field}={own}, the unit's first has "
                f"{field}={wanted}: wrap its layer as a unit of its own"
            )
