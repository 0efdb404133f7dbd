"""Options of DDP that look at each backward pass as a whole.

`find_unused_parameters` searches the graph for parameters that will get no
gradient; `check_reduction` asks, at the end, whether all ranks got them all.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.utils import _pytree as pytree

from miniddp import checks
from miniddp.ddp import DistributedDataParallel, Reducer


def build_reducer(ddp: DistributedDataParallel) -> Reducer:
    if ddp.find_unused_parameters:
        return SearchingReducer(ddp)
    return CheckingReducer(ddp)


class WatchingReducer(Reducer):
    """A reducer that is told when a backward pass begins."""

    def prepare_for_backward(self, output: Any) -> Any:
        super().prepare_for_backward(output)
        leaves, structure = pytree.tree_flatten(output)
        places = [i for i, leaf in enumerate(leaves) if has_graph(leaf)]
        tensors = [leaves[i] for i in places]
        for i, tensor in zip(places, self.watch(tensors), strict=True):
            leaves[i] = tensor
        return pytree.tree_unflatten(leaves, structure)

    def watch(self, tensors: list[Tensor]) -> Sequence[Tensor]:
        """Together: backward through one passes by the others, too."""
        watched: Sequence[Tensor] = Watch.apply(self, *tensors)  # type: ignore[no-untyped-call]
        return watched

    def begin_backward(self) -> None:
        if not self.expecting:
            raise checks.second_backward()

    def count(self, flags: Iterable[bool]) -> list[int]:
        """On how many ranks each flag is set."""
        device = self.parameters[0].device
        counts = torch.tensor(list(flags), dtype=torch.int32, device=device)
        dist.all_reduce(counts, group=self.group)
        return counts.tolist()


class Watch(torch.autograd.Function):
    """The identity, and a word to the reducer when backward comes by."""

    @staticmethod
    def forward(
        ctx: Any, reducer: WatchingReducer, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.reducer = reducer
        ctx.set_materialize_grads(False)  # None for outputs not in the loss
        return tuple(tensor.clone() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        ctx.reducer.begin_backward()
        return None, *gradients


class SearchingReducer(WatchingReducer):
    """`find_unused_parameters=True`: buckets do not wait for the unused."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        super().__init__(ddp)
        self.rebuilt = True  # the order may be another one in each pass

    def prepare_for_backward(self, output: Any) -> Any:
        output = super().prepare_for_backward(output)
        reached = reached_leaves(output)
        each = enumerate(self.parameters)
        self.unused = [i for i, p in each if p not in reached]
        return output

    def on_gradient(self, i: int) -> None:
        with self.lock:
            unused, self.unused = self.unused, []
            for j in unused:
                self.put_into_bucket(j)
            super().on_gradient(i)

    def finish(self) -> None:
        here = [parameter.grad is not None for parameter in self.parameters]
        self.used = self.count(here)
        super().finish()

    def give_mean(self, i: int) -> None:
        if self.used[i]:
            super().give_mean(i)


def reached_leaves(output: Any) -> set[Tensor]:
    """The leaves of the output's graph: backward gives them a gradient."""
    waiting = [leaf.grad_fn for leaf in leaves_of(output) if has_graph(leaf)]
    seen: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += [each for each, _ in node.next_functions]
    return {node.variable for node in seen if hasattr(node, "variable")}


def leaves_of(output: Any) -> Iterator[Any]:
    """What lists, tuples, dictionaries and dataclasses hold."""
    for leaf in pytree.tree_leaves(output):
        if is_dataclass(leaf) and not isinstance(leaf, type):
            fields_of = [getattr(leaf, field.name) for field in fields(leaf)]
            yield from leaves_of(fields_of)
        else:
            yield leaf


def has_graph(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.grad_fn is not None


class CheckingReducer(WatchingReducer):
    """`check_reduction=True`: each backward ends with a look at all ranks."""

    queued = False

    def watch(self, tensors: list[Tensor]) -> Sequence[Tensor]:
        """Each alone: what stays out of the loss is to be missed."""
        return [super(CheckingReducer, self).watch([t])[0] for t in tensors]

    def begin_backward(self) -> None:
        super().begin_backward()
        if not self.queued:
            self.queued = True
            Variable._execution_engine.queue_callback(self.check)

    @torch.no_grad()
    def check(self) -> None:
        """Raise, on every rank, if one of them lacks a gradient."""
        self.queued = False
        if not self.ready:  # of torch.autograd.grad, or all are frozen
            return
        here = [i in self.ready for i in range(len(self.parameters))]
        for i, ready in enumerate(here):
            if not ready:
                self.on_gradient(i)
        counts = self.count(here)
        if min(counts) < self.world_size:
            self.finish()
            raise checks.left_out(self.names, counts, self.world_size)
