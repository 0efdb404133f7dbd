"""Options of DDP that look at each backward pass as a whole.

`find_unused_parameters` searches the graph for parameters that will get no
gradient; `check_reduction` asks, at the end, whether all ranks got them all.
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.utils import _pytree as pytree

from miniddp.ddp import checks
from miniddp.ddp.reducer import Reducer


class SearchingReducer(Reducer):
    """`find_unused_parameters=True`: buckets do not wait for the unused."""

    def prepare_for_backward(self, output: Any) -> Any:
        super().prepare_for_backward(output)
        reached = reached_leaves(output)
        each = enumerate(self.parameters)
        self.unused = [i for i, p in each if p not in reached]
        tensors = filter(has_graph, pytree.tree_leaves(output))
        together = iter(Sink.apply(*tensors))  # type: ignore[no-untyped-call]
        return pytree.tree_map_only(has_graph, lambda _: next(together), output)

    def autograd_hook(self, i: int) -> None:
        with self.lock:
            while self.expecting and self.unused:
                self.put_into_bucket(self.unused.pop())
            super().autograd_hook(i)

    def finish(self) -> None:
        here = [parameter.grad is not None for parameter in self.parameters]
        self.used = count_ranks(self, here)
        super().finish()

    def give_mean(self, i: int) -> None:
        if self.used[i]:
            super().give_mean(i)


class Sink(torch.autograd.Function):
    """The identity of all outputs at once.

    Backward through one of them comes by the others, too, so that the hooks of
    parameters behind an output that is not in the loss run.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # to those it brings None
        return tuple(tensor.clone() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return gradients


def reached_leaves(output: Any) -> set[Tensor]:
    """The leaves of the output's graph: backward gives them a gradient."""
    waiting: list[Any] = [t.grad_fn for t in tensors_with_graph(output)]
    seen: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += [each for each, _ in node.next_functions]
    return {node.variable for node in seen if hasattr(node, "variable")}


def tensors_with_graph(output: Any) -> Iterator[Tensor]:
    """Those in lists, tuples, dictionaries and dataclasses."""
    for leaf in pytree.tree_leaves(output):
        if is_dataclass(leaf):
            held = [getattr(leaf, field.name) for field in fields(leaf)]
            yield from tensors_with_graph(held)
        elif has_graph(leaf):
            yield leaf


def has_graph(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.grad_fn is not None


def count_ranks(reducer: Reducer, flags: list[bool]) -> list[int]:
    """On how many ranks each flag is set."""
    device = reducer.parameters[0].device
    counts = torch.tensor(flags, dtype=torch.int32, device=device)
    dist.all_reduce(counts, group=reducer.group)
    return counts.tolist()


class CheckingReducer(Reducer):
    """`check_reduction=True`: nothing is sent before all ranks have it all."""

    def prepare_for_backward(self, output: Any) -> Any:
        self.queued = False
        for tensor in tensors_with_graph(output):
            tensor.register_hook(self.begin_backward)  # type: ignore[no-untyped-call]
        return super().prepare_for_backward(output)

    def begin_backward(self, _: Any = None) -> None:
        if not self.expecting:
            raise RuntimeError(
                "backward ran again through a forward pass whose gradients "
                "are averaged already: call the model again first, or run the "
                "first forward and backward inside no_sync()"
            )
        with self.lock:
            if not self.queued:
                Variable._execution_engine.queue_callback(self.check)
            self.queued = True

    def launch_full_buckets(self) -> None:
        """Not yet: see to it that `check` will do it."""
        self.begin_backward()

    @torch.no_grad()
    def check(self) -> None:
        """Raise, on every rank, if one of them lacks a gradient."""
        self.queued = False
        here = [i in self.ready for i in range(len(self.parameters))]
        counts = count_ranks(self, here)
        if max(counts) == 0:  # of torch.autograd.grad, or all are frozen
            return
        if min(counts) < self.world_size:
            self.expecting = False
            raise checks.left_out(self.names, counts, self.world_size)
        super().launch_full_buckets()
