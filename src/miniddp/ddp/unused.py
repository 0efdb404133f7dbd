"""Reducers that look at each backward pass as a whole.

`find_unused_parameters` searches the graph for parameters that will get no
gradient; `check_reduction` asks, at the end, whether all ranks got them all.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from miniddp.ddp import errors
from miniddp.ddp.outputs import join_graphs, reached_leaves
from miniddp.ddp.reducer import Reducer


class SearchingReducer(Reducer):
    """`find_unused_parameters=True`: buckets do not wait for the unused."""

    cures = errors.CURES_OF_SEARCH

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, Tensor]],
        group: dist.ProcessGroup,
        cap_mb: float | None,
        as_views: bool,
        current: Callable[[], Iterable[Tensor]],
    ) -> None:
        self.unused: list[int] = []  # and not marked ready so far
        self.not_found: set[int] = set()
        self.used: set[int] = set()  # since the last mean, in no_sync too
        super().__init__(
            named_parameters, group, cap_mb, as_views, current, rebuild=False
        )

    def prepare_for_backward(self, output: Any) -> Any:
        reached = reached_leaves(output)
        self.unused = [
            i for i, p in enumerate(self.parameters) if p not in reached
        ]
        self.not_found = set(self.unused)
        self.check_parameters(self.unused)
        output = super().prepare_for_backward(join_graphs(output))
        self.without.update(self.unused)
        return output

    def mark_ready(self, i: int) -> None:
        with self.lock:
            self.used.add(i)
            while self.expecting and self.unused:
                super().mark_ready(self.unused.pop())
            if self.expecting and i in self.not_found:
                raise errors.not_found(self.names[i])
            super().mark_ready(i)

    def finish(self) -> None:
        """A gradient that no rank has computed stays as it is, as in torch."""
        here = [
            i in self.used and parameter.grad is not None
            for i, parameter in enumerate(self.parameters)
        ]
        self.used.clear()
        counts = count_ranks(self, here)
        self.unused_everywhere = set()
        if not all(here):  # else the host need not wait for the counts
            self.unused_everywhere = {
                i for i, count in enumerate(counts.tolist()) if count == 0
            }
        super().finish()


def count_ranks(reducer: Reducer, flags: list[bool]) -> Tensor:
    """On how many ranks each flag is set; int32, on the parameters' device."""
    device = reducer.parameters[0].device
    counts = torch.tensor(flags, dtype=torch.int32, device=device)
    dist.all_reduce(counts, group=reducer.group)
    return counts


class CheckingReducer(Reducer):
    """`check_reduction=True`: nothing is sent before all ranks have it all."""

    def mark_ready(self, i: int) -> None:
        if self.expecting:
            self.begin_backward()  # in case no output could be found
        super().mark_ready(i)

    def launch_full_buckets(self) -> None:
        """Not yet: `end_backward` will do it."""

    @torch.no_grad()
    def end_backward(self) -> None:
        """Raise, on every rank, if one of them lacks a gradient."""
        super().end_backward()
        if not self.expecting:
            return
        ready = set(self.ready)
        here = [i in ready for i in range(len(self.parameters))]
        counts = count_ranks(self, here).tolist()
        if max(counts) == 0:  # of torch.autograd.grad, or all are frozen
            return
        if min(counts) < self.world_size:
            self.expecting = False
            raise errors.left_out(self.names, counts, self.world_size)
        super().launch_full_buckets()
