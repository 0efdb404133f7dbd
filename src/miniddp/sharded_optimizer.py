"""`ShardedOptimizer`, ZeRO stage 1: each rank keeps the optimizer's state of its own parameters."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from miniddp.process import check_group


class ShardedOptimizer(Optimizer):
    """An optimizer whose state is spread over the ranks, for a model that DDP replicates.

    Every parameter belongs to one rank. In `step` a rank updates what belongs to it, with
    `optimizer_class(…, **defaults)`, and sends the result to the others. The gradients must be the
    same on every rank: call `step` after the backward of `DistributedDataParallel` or after
    `SimpleDDP.sync_gradients()`. Parameters stay whole, so any optimizer works that treats each
    one by itself; how even the shards are depends on the largest one. Methods and their meaning
    are those of `torch.distributed.optim.ZeroRedundancyOptimizer` (Rajbhandari et al., "ZeRO",
    2020). Every rank of `process_group` must make the same calls.

    Raises `RuntimeError` without a process group, `ValueError` if the ranks pass different
    parameters.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: type[Optimizer],
        process_group: dist.ProcessGroup | None = None,
        **defaults: Any,
    ) -> None:
        check_group(process_group)
        self.process_group = process_group
        self.rank = dist.get_rank(process_group)
        self._elements = [0] * dist.get_world_size(process_group)
        self._owner: dict[Tensor, int] = {}
        self._optimizer: Optimizer | None = None
        self._consolidated: dict[str, Any] | None = None
        super().__init__(params, defaults)
        self._check_same_on_all_ranks()
        self._optimizer = optimizer_class(self._own_groups(), **defaults)
        self.defaults = self._optimizer.defaults
        self.state = self._optimizer.state
        self._take_options(self._optimizer)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, each to the rank that has the fewest elements so far."""
        super().add_param_group(param_group)
        for parameter in sorted(self.param_groups[-1]["params"], key=Tensor.numel, reverse=True):
            smallest = self._elements.index(min(self._elements))
            self._owner[parameter] = smallest
            self._elements[smallest] += parameter.numel()
        if self._optimizer is not None:
            self._optimizer.add_param_group(self._own_groups()[-1])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's parameters, then receive those of the others.

        Returns the loss that `closure` returns, if there is one.
        """
        assert self._optimizer is not None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._optimizer.param_groups = self._own_groups()  # a scheduler changes the options of ours
        self._optimizer.step()
        self._take_options(self._optimizer)
        self._broadcast_parameters()
        self._consolidated = None
        return loss

    def _own_groups(self) -> list[dict[str, Any]]:
        """The parameter groups, cut down to the parameters of this rank."""
        return [
            {**group, "params": [p for p in group["params"] if self._owner[p] == self.rank]}
            for group in self.param_groups
        ]

    def _take_options(self, optimizer: Optimizer) -> None:
        for group, own in zip(self.param_groups, optimizer.param_groups, strict=True):
            group.update({name: value for name, value in own.items() if name != "params"})

    def _broadcast_parameters(self) -> None:
        """Send each parameter from its owner to all; start them all before waiting for one."""
        dense = [(parameter, parameter.contiguous()) for parameter in self._owner]
        works = [
            dist.broadcast(
                tensor, group=self.process_group, group_src=self._owner[parameter], async_op=True
            )
            for parameter, tensor in dense
        ]
        for (parameter, tensor), work in zip(dense, works, strict=True):
            work.wait()
            if tensor is not parameter:
                parameter.copy_(tensor)

    def _check_same_on_all_ranks(self) -> None:
        own = [
            [(tuple(parameter.shape), str(parameter.dtype)) for parameter in group["params"]]
            for group in self.param_groups
        ]
        gathered: list[Any] = [None] * len(self._elements)
        dist.all_gather_object(gathered, own, group=self.process_group)
        odd = [str(rank) for rank, other in enumerate(gathered) if other != gathered[0]]
        if odd:
            raise ValueError(
                f"the optimizer of rank {', '.join(odd)} got other parameters than that of rank 0: "
                "every rank must pass the same ones, in the same groups and order"
            )

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collect the state of all ranks on rank `to` of the group, in host memory."""
        own = {index: _to_host(state) for index, state in super().state_dict()["state"].items()}
        gathered: list[Any] | None = [None] * len(self._elements) if self.rank == to else None
        group = self.process_group or dist.group.WORLD
        assert group is not None
        dist.gather_object(own, gathered, dst=dist.get_global_rank(group, to), group=group)
        if gathered is not None:
            merged = {index: state for part in gathered for index, state in part.items()}
            self._consolidated = {**super().state_dict(), "state": dict(sorted(merged.items()))}

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as the unsharded optimizer would return it, on the rank that has it.

        Raises `RuntimeError` on a rank that has not collected it since the last step.
        """
        if self._consolidated is None:
            raise RuntimeError(
                f"rank {self.rank} has only its own part of the optimizer's state: call "
                f"consolidate_state_dict(to={self.rank}) on every rank after the last step"
            )
        return self._consolidated

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep this rank's part of a whole state, which may be an unsharded optimizer's."""
        assert self._optimizer is not None
        owners = [self._owner[p] for group in self.param_groups for p in group["params"]]
        own = {
            index: state
            for index, state in state_dict["state"].items()
            if index >= len(owners) or owners[index] == self.rank
        }
        super().load_state_dict({**state_dict, "state": own})
        self._optimizer.state = self.state
        self._consolidated = None


def _to_host(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.cpu() if isinstance(value, Tensor) else value for name, value in state.items()
    }
