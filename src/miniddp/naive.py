"""`SimpleDDP`: the ancestor. Backward first, then one all-reduce per parameter."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from miniddp.replicate import verify_replicas


class Gradient(IntEnum):
    """What a rank holds for one parameter when it is time to synchronise."""

    NONE = 0
    DENSE = 1
    SPARSE = 2


class SimpleDDP(nn.Module):
    """Data parallelism in three lines: forward, backward, `sync_gradients()`, optimizer step.

    Wraps `module`, whose parameters and buffers must be the same on every rank of `process_group`
    (default: all ranks). Buffers are not synchronised again.

    Raises `RuntimeError` without a process group, `ValueError` if the replicas differ or if
    `module` holds a `SimpleDDP` already.
    """

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        if any(isinstance(part, SimpleDDP) for part in module.modules()):
            raise ValueError("the module is wrapped in SimpleDDP already: wrap it once")
        verify_replicas(module, process_group)
        self.module = module
        self.process_group = process_group
        self._do_sync = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @property
    def do_sync(self) -> bool:
        """Whether `sync_gradients()` synchronises or does nothing."""
        return self._do_sync

    def enable_grad_sync(self) -> None:
        self._do_sync = True

    def disable_grad_sync(self) -> None:
        self._do_sync = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, `sync_gradients()` does nothing: gradients accumulate on their rank."""
        before = self._do_sync
        self._do_sync = False
        try:
            yield
        finally:
            self._do_sync = before

    @torch.no_grad()
    def sync_gradients(self) -> None:
        """Replace every gradient by its mean over the ranks, in place. Call it after backward.

        Raises `RuntimeError` on every rank, and changes no gradient, if a parameter has a gradient
        on some ranks only or has a sparse one.
        """
        if not self._do_sync:
            return
        parameters = dict(self.module.named_parameters())
        self._check_gradients(parameters)
        world_size = dist.get_world_size(self.process_group)
        for parameter in parameters.values():
            if _state(parameter) is Gradient.NONE or parameter.grad is None:
                continue
            gradient = parameter.grad.contiguous()
            gradient /= world_size  # before the sum: float16 would overflow after it
            dist.all_reduce(gradient, group=self.process_group)
            parameter.grad.copy_(gradient)

    def _check_gradients(self, parameters: dict[str, nn.Parameter]) -> None:
        """Compare the ranks before the first all-reduce: one that has less to send would hang."""
        if not parameters:
            return
        device = next(iter(parameters.values())).device
        own = torch.tensor(
            [_state(parameter) for parameter in parameters.values()],
            dtype=torch.uint8,
            device=device,
        )
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(self.process_group))]
        dist.all_gather(gathered, own, group=self.process_group)
        states = torch.stack(gathered).T.tolist()
        for name, on_ranks in zip(parameters, states, strict=True):
            if Gradient.SPARSE in on_ranks:
                raise RuntimeError(
                    f"parameter {name!r} has a sparse gradient, which SimpleDDP cannot "
                    "synchronise: build its layer with sparse=False"
                )
            if len(set(on_ranks)) > 1:
                raise RuntimeError(
                    f"parameter {name!r} has a gradient on rank {self._ranks(on_ranks, True)} and "
                    f"none on rank {self._ranks(on_ranks, False)}: every rank must use the same "
                    "parameters in a step"
                )

    def _ranks(self, states: list[int], present: bool) -> str:
        ranks = dist.get_process_group_ranks(self.process_group or dist.group.WORLD)
        chosen = (rank for rank, state in zip(ranks, states, strict=True) if bool(state) is present)
        return ", ".join(map(str, chosen))


def _state(parameter: nn.Parameter) -> Gradient:
    """A frozen parameter has no gradient to synchronise, even if an old one is still there."""
    if not parameter.requires_grad or parameter.grad is None:
        return Gradient.NONE
    return Gradient.SPARSE if parameter.grad.layout is torch.sparse_coo else Gradient.DENSE
