"""What a rank's memory holds, counted: between two steps, during one, and at most."""

import resource
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from instruments.memory import Memory
from miniddp.ddp import DistributedDataParallel


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes behind these tensors on this rank; those of a shared storage count once."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def optimizer_state(optimizer: Optimizer) -> list[Tensor]:
    """The state that grows with the parameters: not the counters of steps."""
    inner = getattr(optimizer, "optim", optimizer)  # of ZeroRedundancyOptimizer
    found = []
    for state in inner.state.values():
        found += [value for name, value in state.items() if name != "step"]
    return found


def model_states(module: nn.Module, optimizer: Optimizer) -> Memory:
    """The bytes of parameters, gradients and optimizer state that this rank holds now."""
    parameters = list(module.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    return Memory(
        storage_bytes(parameters),
        storage_bytes(gradients),
        storage_bytes(optimizer_state(optimizer)),
    )


class LiveBytes(TorchDispatchMode):
    """Within it, the bytes of those tensors alive that were given, or made since.

    Each operation of PyTorch is seen, whatever calls it. `peak` is the most so far.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: dict[int, StorageWeakRef] = {}
        self.peak = 0
        for tensor in tensors:
            self.add(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        return result

    def add(self, tensor: Tensor) -> None:
        storage = StorageWeakRef(tensor.untyped_storage())
        if storage.cdata in self.storages:
            return
        self.storages[storage.cdata] = storage
        if tensor.nbytes > 2**16:  # looking at all of them takes time
            self.peak = max(self.peak, self.now())

    def now(self) -> int:
        """The bytes that are alive at this moment."""
        alive = {}
        for key, reference in self.storages.items():
            if not reference.expired():
                alive[key] = reference
        self.storages = alive
        total = 0
        for reference in alive.values():
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            total += storage.nbytes() if storage is not None else 0
        return total


@dataclass(frozen=True)
class StepBytes:
    """Bytes before a step, those that forward leaves for backward, and the step's peak."""

    before: int
    kept: int
    peak: int


def bytes_of_step(
    module: nn.Module, optimizer: Optimizer, batch: Mapping[str, Tensor]
) -> StepBytes:
    """Take a step, and count. `module(**batch)` has a `loss`.

    On a GPU its allocator counts, of all that this process holds. On a CPU it is
    `LiveBytes`: of parameters, optimizer state, DDP's buckets, and what the step makes.
    """
    if next(module.parameters()).is_cuda:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss = module(**batch).loss
        kept = torch.cuda.memory_allocated() - before
        loss.backward()
        optimizer.step()
        return StepBytes(before, kept, torch.cuda.max_memory_allocated())
    held = [*module.parameters(), *optimizer_state(optimizer)]
    if isinstance(module, DistributedDataParallel):
        held += [bucket.buffer() for bucket in module.reducer.buckets]
    with LiveBytes(held) as live:
        before = live.now()
        loss = module(**batch).loss
        kept = live.now() - before
        loss.backward()
        optimizer.step()
    return StepBytes(before, kept, live.peak)


def bytes_kept_for_backward(module: nn.Module, forward: Callable[[], Tensor]) -> int:
    """The bytes that autograd keeps of `forward()`, those of the module's own left out."""
    weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward()
    assert loss.grad_fn is not None, "nothing was kept"
    return sum(kept.values())  # while the loss is alive: no storage is used twice


def limit_memory(num_bytes: float) -> None:
    """Let this process take so many bytes more than it has, and refuse the rest.

    The operating system refuses, as a GPU would: Linux, and the CPU's memory only. There
    is no way back.
    """
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmData"))
    taken = 1024 * int(line.split()[1])
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (taken + int(num_bytes), hard))
