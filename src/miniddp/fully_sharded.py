"""`FullyShardedModule`, ZeRO stage 3: a rank keeps 1/N of the parameters and gathers the rest."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from miniddp import ring
from miniddp.flat import FlatParameters
from miniddp.process import check_group
from miniddp.replicate import verify_replicas


class Gather(torch.autograd.Function):
    """All-gather in forward, its transpose in backward: reduce-scatter of the gradient."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, unit: "FullyShardedModule") -> Tensor:
        ctx.unit = unit
        return unit.gather()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.unit.reduce_scatter(gradient), None


class Piece(NamedTuple):
    """What autograd keeps of a gathered parameter from forward until backward: where it was."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    version: int


class FullyShardedModule(nn.Module):
    """Spread the parameters of `module` over the ranks; have them whole only while they are used.

    The parameters become one flat vector, padded with zeros to a multiple of N; rank r keeps the
    r-th part of it as its only parameter, `shard`. Forward gathers the whole vector and drops it;
    backward gathers it again, and leaves in `shard.grad` this rank's part of the mean gradient.
    `reshard_after_forward=False` keeps the whole vector from forward until backward: two transfers
    of the parameters instead of three, for more memory.

    What is gathered at a time is a unit. Wrap each layer, then the whole model: a wrapper leaves
    out what wrappers inside it hold. Any optimizer that treats each element by itself works on
    `.parameters()`. A norm over all gradients needs a sum over the ranks. Parameters and buffers
    start as rank 0's; buffers stay whole and are not synchronised again. All ranks must call the
    units in the same order. Under `torch.utils.checkpoint` pass `reshard_after_forward=False`: the
    checkpoint, which must be around the unit, itself drops what was gathered.

    Communication waits. torch's `fully_shard` gathers the next unit while this one computes.

    Raises `RuntimeError` without a process group; `ValueError` if the ranks pass different modules,
    if there is no parameter, if a parameter is in another unit already, or if the parameters of a
    unit differ in dtype, device or `requires_grad`.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        reshard_after_forward: bool = True,
    ) -> None:
        super().__init__()
        check_group(process_group)
        if isinstance(module, FullyShardedModule):
            raise ValueError("the module is wrapped in FullyShardedModule already: wrap it once")
        verify_replicas(module, process_group, values=False)
        self.module = module
        self.process_group = process_group
        self.reshard_after_forward = reshard_after_forward
        self._world_size = dist.get_world_size(process_group)
        self._rank = dist.get_rank(process_group)
        self._bytes_sent = 0
        self._whole: Tensor | None = None
        self._flat = FlatParameters(module, self._world_size, skip=FullyShardedModule)
        if next(module.parameters(), None) is None:
            raise ValueError(f"{type(module).__name__} has no parameter: there is nothing to shard")
        self.shard = self._take_shard()
        for buffer in module.buffers():
            dist.broadcast(buffer, group=process_group, group_src=0)

    def _take_shard(self) -> nn.Parameter | None:
        """This rank's part of rank 0's parameters; None if all of them are in units inside."""
        if not self._flat.slots:
            return None
        requires_grad = self._flat.requires_grad
        whole = self._flat.take()
        dist.broadcast(whole, group=self.process_group, group_src=0)
        return nn.Parameter(self._own_part(whole).clone(), requires_grad)

    def _own_part(self, whole: Tensor) -> Tensor:
        return whole.chunk(self._world_size)[self._rank]

    # Forward and backward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.shard is None:
            return self.module(*args, **kwargs)
        self._whole = None
        whole = Gather.apply(self.shard, self)  # type: ignore[no-untyped-call]
        self._flat.place(whole)
        try:
            with self._saving(whole, self.shard):
                return self.module(*args, **kwargs)
        finally:
            self._flat.place(None)

    def gather(self) -> Tensor:
        """The whole flat vector of this unit. Every rank must call it."""
        assert self.shard is not None
        shard = self.shard.detach()
        whole = shard.new_empty(len(shard) * self._world_size)
        self._bytes_sent += ring.all_gather_into_tensor(whole, shard, self.process_group)
        return whole

    def reduce_scatter(self, gradient: Tensor) -> Tensor:
        """This rank's part of the mean of the ranks' gradients of the whole flat vector."""
        self._whole = None  # backward through this unit is over
        gradient = gradient / self._world_size  # before the sum: float16 would overflow after it
        own = torch.empty_like(self._own_part(gradient))
        self._bytes_sent += ring.reduce_scatter_tensor(own, gradient, group=self.process_group)
        return own

    def _saving(self, whole: Tensor, shard: nn.Parameter) -> AbstractContextManager[Any]:
        """Within it autograd remembers a `Piece` of `whole`, and does not keep `whole` alive."""
        if not (self.reshard_after_forward and shard.requires_grad):
            return nullcontext()
        address = whole.untyped_storage().data_ptr()
        version = shard._version

        def pack(tensor: Tensor) -> Tensor | Piece:
            if tensor.layout != torch.strided or tensor.untyped_storage().data_ptr() != address:
                return tensor
            return Piece(tensor.size(), tensor.stride(), int(tensor.storage_offset()), version)

        def unpack(saved: Tensor | Piece) -> Tensor:
            if isinstance(saved, Tensor):
                return saved
            if saved.version != shard._version:
                raise RuntimeError(
                    "the parameters of a FullyShardedModule changed between forward and backward: "
                    "call backward before optimizer.step()"
                )
            if self._whole is None:
                self._whole = self.gather()
            return self._whole.as_strided(saved.size, saved.stride, saved.offset)

        return saved_tensors_hooks(pack, unpack)

    # Counting, saving and loading

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent so far for this unit and for those inside it."""
        units = (unit for unit in self.modules() if isinstance(unit, FullyShardedModule))
        return sum(unit._bytes_sent for unit in units)

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Any]:
        """What `state_dict()` of the unwrapped module would be, in host memory, on every rank.

        Every rank must call it. `state_dict()` itself has this rank's shards.
        """
        shards = dict(self.named_parameters(remove_duplicate=False))
        state = {
            self._unwrapped(name): value.cpu() if isinstance(value, Tensor) else value
            for name, value in self.state_dict().items()
            if name not in shards
        }
        for path, unit in self._units():
            whole = unit.gather().cpu()
            for slot, tensor in zip(unit._flat.slots, unit._flat.split(whole), strict=True):
                state.update({self._unwrapped(path + name): tensor.clone() for name in slot.places})
        return state

    @torch.no_grad()
    def load_full_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take this rank's part of what `full_state_dict()` or the unwrapped module returned.

        Raises `ValueError`, and changes nothing, if a name is missing or unknown, or for a shape
        that differs.
        """
        shards = dict(self.named_parameters(remove_duplicate=False))
        others = {self._unwrapped(name): name for name in self.state_dict() if name not in shards}
        shapes = {
            self._unwrapped(path + name): slot.shape
            for path, unit in self._units()
            for slot in unit._flat.slots
            for name in slot.places
        }
        _check_state(state, {**dict.fromkeys(others), **shapes})
        self.load_state_dict({name: state[key] for key, name in others.items()}, strict=False)
        for path, unit in self._units():
            assert unit.shard is not None
            names = [self._unwrapped(path + next(iter(s.places))) for s in unit._flat.slots]
            whole = unit._flat.flatten([state[name] for name in names])
            unit.shard.copy_(unit._own_part(whole))

    def _units(self) -> "Iterator[tuple[str, FullyShardedModule]]":
        """The units that hold parameters, with the path to the module that each wraps."""
        for name, module in self.named_modules(remove_duplicate=False):
            if isinstance(module, FullyShardedModule) and module.shard is not None:
                yield f"{name}.module.".removeprefix("."), module

    def _unwrapped(self, name: str) -> str:
        """The name of a parameter or buffer without the wrappers on the way to it."""
        module: nn.Module = self
        kept = []
        *path, last = name.split(".")
        for part in path:
            if not isinstance(module, FullyShardedModule):
                kept.append(part)
            module = module.get_submodule(part)
        return ".".join([*kept, last])


def _check_state(state: Mapping[str, Any], expected: Mapping[str, torch.Size | None]) -> None:
    if missing := sorted(expected.keys() - state.keys()):
        raise ValueError(f"the state lacks {', '.join(map(repr, missing))}")
    if unknown := sorted(state.keys() - expected.keys()):
        raise ValueError(f"the state has {', '.join(map(repr, unknown))}, which the module lacks")
    for name, shape in expected.items():
        if shape is not None and state[name].shape != shape:
            raise ValueError(
                f"the state has {name!r} of shape {tuple(state[name].shape)}, "
                f"the module of shape {tuple(shape)}"
            )
