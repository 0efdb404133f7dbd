"""`ShardedOptimizer`, ZeRO stage 1: a rank keeps the state of its own part."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from miniddp.process import check_group
from miniddp.replicate import broadcast_coalesced


class ShardedOptimizer(Optimizer):
    """An optimizer whose state is spread over the ranks of replicas.

    Every parameter belongs to one rank. In `step` a rank updates its own, with
    `optimizer_class(…, **defaults)`, and sends them to the others. Gradients
    must be the same on every rank: call `step` after the backward of
    `DistributedDataParallel` or after `SimpleDDP.sync_gradients()`. Parameters
    stay whole, so any optimizer works that treats each one by itself; the
    largest one limits how even the shards are. The methods are those of
    `torch.distributed.optim.ZeroRedundancyOptimizer` (Rajbhandari et al.,
    "ZeRO", 2020), and every rank of `process_group` must call them alike.

    Raises `RuntimeError` without a process group, `ValueError` if the ranks
    pass different parameters.
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
        self._whole_state: dict[str, Any] | None = None
        super().__init__(params, defaults)
        self._check_same_on_all_ranks()
        self._optimizer = optimizer_class(self._own_groups(), **defaults)
        self.defaults = self._optimizer.defaults
        self.state = self._optimizer.state
        self._take_options(self._optimizer)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Give each parameter to the rank with the fewest elements so far."""
        super().add_param_group(param_group)
        parameters = self.param_groups[-1]["params"]
        for parameter in sorted(parameters, key=Tensor.numel, reverse=True):
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
        self._optimizer.param_groups = self._own_groups()  # perhaps a new lr
        self._optimizer.step()
        self._take_options(self._optimizer)
        self._broadcast_parameters()
        self._whole_state = None
        return loss

    def _own_groups(self) -> list[dict[str, Any]]:
        """The parameter groups, cut down to the parameters of this rank."""
        groups = []
        for group in self.param_groups:
            own = [p for p in group["params"] if self._owner[p] == self.rank]
            groups.append({**group, "params": own})
        return groups

    def _take_options(self, optimizer: Optimizer) -> None:
        groups = zip(self.param_groups, optimizer.param_groups, strict=True)
        for group, own in groups:
            group.update({**own, "params": group["params"]})

    def _broadcast_parameters(self) -> None:
        for rank in range(len(self._elements)):
            own = [p for p, owner in self._owner.items() if owner == rank]
            broadcast_coalesced(own, self.process_group, src=rank)

    def _check_same_on_all_ranks(self) -> None:
        own = [
            [(tuple(p.shape), str(p.dtype)) for p in group["params"]]
            for group in self.param_groups
        ]
        every: list[Any] = [None] * len(self._elements)
        dist.all_gather_object(every, own, group=self.process_group)
        odd = [str(r) for r, other in enumerate(every) if other != every[0]]
        if odd:
            raise ValueError(
                f"the optimizer of rank {', '.join(odd)} got other parameters "
                "than that of rank 0: pass the same, in the same groups"
            )

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collect the state of all ranks on rank `to`, in host memory."""
        own = {
            index: {name: to_host(value) for name, value in state.items()}
            for index, state in super().state_dict()["state"].items()
        }
        parts: list[Any] | None = None
        if self.rank == to:
            parts = [None] * len(self._elements)
        dist.gather_object(own, parts, group=self.process_group, group_dst=to)
        if parts is not None:
            merged = {i: state for part in parts for i, state in part.items()}
            state = dict(sorted(merged.items()))
            self._whole_state = {**super().state_dict(), "state": state}

    def state_dict(self) -> dict[str, Any]:
        """The state of the whole optimizer, on the rank that collected it.

        Raises `RuntimeError` on a rank that has not collected it since a step.
        """
        if self._whole_state is None:
            raise RuntimeError(
                f"rank {self.rank} has only its own part of the optimizer's "
                f"state: call consolidate_state_dict(to={self.rank}) on every "
                "rank after the last step"
            )
        return self._whole_state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep this rank's part of a whole state, also an unsharded one's."""
        assert self._optimizer is not None
        parameters = [p for group in self.param_groups for p in group["params"]]
        owners = {i: self._owner[p] for i, p in enumerate(parameters)}
        state = state_dict["state"].items()
        own = {i: each for i, each in state if owners.get(i) == self.rank}
        super().load_state_dict({**state_dict, "state": own})
        self._optimizer.state = self.state
        self._whole_state = None


def to_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value
