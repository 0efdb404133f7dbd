"""`SimpleDDP`, the ancestor: after backward, an all-reduce per parameter."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from miniddp.process import Group
from miniddp.replicate import verify_replicas


class SimpleDDP(nn.Module):
    """Data parallelism: forward, backward, `sync_gradients()`, step.

    Raises `ValueError` unless all ranks of the group hold equal replicas.
    """

    def __init__(self, module: nn.Module, process_group: Group = None) -> None:
        super().__init__()
        verify_replicas(module, process_group)
        self.module = module
        self.process_group = process_group
        self.do_sync = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def enable_grad_sync(self) -> None:
        self.do_sync = True

    def disable_grad_sync(self) -> None:
        self.do_sync = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it `sync_gradients()` does nothing: gradients accumulate."""
        before = self.do_sync
        self.do_sync = False
        try:
            yield
        finally:
            self.do_sync = before

    @torch.no_grad()
    def sync_gradients(self) -> None:
        """Replace every gradient by its mean over the ranks, after backward.

        Raises `RuntimeError` on every rank, before anything is changed, if a
        parameter has one on some ranks only, or a sparse one on any.
        """
        if not self.do_sync:
            return
        world_size = dist.get_world_size(self.process_group)
        self._check_gradients(world_size)
        for parameter in self.module.parameters():
            if parameter.requires_grad and parameter.grad is not None:
                gradient = parameter.grad.contiguous()
                gradient /= world_size  # first: a sum may overflow float16
                dist.all_reduce(gradient, group=self.process_group)
                parameter.grad.copy_(gradient)

    def _check_gradients(self, world_size: int) -> None:
        votes = {}  # 1 for a gradient; the sum is negative if one is sparse
        for name, parameter in self.module.named_parameters():
            gradient = parameter.grad if parameter.requires_grad else None
            sparse = gradient is not None and gradient.is_sparse
            votes[name] = -world_size if sparse else int(gradient is not None)
        device = next(self.module.parameters(), torch.empty(0)).device
        counts = torch.tensor(list(votes.values()), device=device)
        dist.all_reduce(counts, group=self.process_group)
        for name, count in zip(votes, counts.tolist(), strict=True):
            if count < 0:
                raise RuntimeError(f"parameter {name!r} has a sparse gradient")
            if 0 < count < world_size:
                raise RuntimeError(
                    f"parameter {name!r} has a gradient on {count} of "
                    f"{world_size} ranks: use the same parameters on all ranks"
                )
