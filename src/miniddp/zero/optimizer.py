"""`ShardedOptimizer`, ZeRO stage 1: a rank keeps the state of its own part."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from miniddp.process import Group, check_group
from miniddp.replicate import broadcast_coalesced, verify_replicas


class ShardedOptimizer(Optimizer):
    """An optimizer whose state is spread over the ranks of replicas.

    Every parameter belongs to one rank. In `step` a rank updates its own, with
    `optimizer_class(…, **defaults)`, and sends them to the others. Gradients
    must be the same on every rank: call `step` after the backward of
    `DistributedDataParallel` or after `SimpleDDP.sync_gradients()`. Any
    optimizer works that treats each parameter by itself; the largest one limits
    how even the shards are. The methods are those of
    `torch.distributed.optim.ZeroRedundancyOptimizer` (Rajbhandari et al.,
    "ZeRO", 2020), and every rank of `process_group` must call them alike.

    Raises `RuntimeError` without a process group, `ValueError` if the ranks
    pass different parameters.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: type[Optimizer],
        process_group: Group = None,
        **defaults: Any,
    ) -> None:
        check_group(process_group)
        self.process_group = process_group
        self.rank = dist.get_rank(process_group)
        self._elements = [0] * dist.get_world_size(process_group)
        self._owner: dict[Tensor, int] = {}
        self.optim: Optimizer | None = None
        self._whole_state: dict[int, Any] | None = None
        super().__init__(params, defaults)
        groups = [nn.ParameterList(g["params"]) for g in self.param_groups]
        verify_replicas(nn.ModuleList(groups), process_group, values=False)
        self.optim = optimizer_class(self._local_groups(), **defaults)
        self.defaults = self.optim.defaults
        self.state = self.optim.state
        self._take_options(self.optim)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Give each parameter to the rank with the fewest elements so far."""
        super().add_param_group(param_group)
        parameters = self.param_groups[-1]["params"]
        for parameter in sorted(parameters, key=Tensor.numel, reverse=True):
            smallest = self._elements.index(min(self._elements))
            self._owner[parameter] = smallest
            self._elements[smallest] += parameter.numel()
        if self.optim is not None:
            self.optim.add_param_group(self._local_groups()[-1])

    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, **kwargs: Any
    ) -> Any:
        """Update this rank's parameters, then receive those of the others.

        Returns the loss that `closure` returns, if there is one.
        """
        assert self.optim is not None
        self.optim.param_groups = self._local_groups()  # perhaps a new lr
        if closure is None:
            loss = self.optim.step(**kwargs)
        else:
            loss = self.optim.step(closure, **kwargs)
        self._take_options(self.optim)
        self._broadcast_parameters()
        self._whole_state = None
        return loss

    def _local_groups(self) -> list[dict[str, Any]]:
        """The parameter groups, cut down to the parameters of this rank."""
        groups = []
        for group in self.param_groups:
            mine = [p for p in group["params"] if self._owner[p] == self.rank]
            groups.append({**group, "params": mine})
        return groups

    def _take_options(self, optimizer: Optimizer) -> None:
        groups = zip(self.param_groups, optimizer.param_groups, strict=True)
        for group, local in groups:
            group.update({**local, "params": group["params"]})

    def _broadcast_parameters(self) -> None:
        for rank in range(len(self._elements)):
            parameters = [p for p, r in self._owner.items() if r == rank]
            broadcast_coalesced(parameters, self.process_group, src=rank)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collect the state of all ranks on rank `to`, in host memory.

        It receives the parts one by one, so that besides the whole state only
        the largest part takes room.
        """
        state = super().state_dict()["state"]
        part = {i: to_host(values) for i, values in state.items()}
        a_parameter = next(iter(self._owner))
        with torch.cuda.device_of(a_parameter):
            if self.rank == to:
                self._whole_state = self._receive_parts(part)
            else:
                dist.send_object_list(
                    [part], group=self.process_group, group_dst=to
                )

    def _receive_parts(self, part: dict[int, Any]) -> dict[int, Any]:
        """The whole state, of which this rank has `part`."""
        whole = dict(part)
        for rank in range(len(self._elements)):
            if rank != self.rank:
                received: list[Any] = [None]
                dist.recv_object_list(
                    received, group=self.process_group, group_src=rank
                )
                whole |= received[0]
        return dict(sorted(whole.items()))

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
        return {**super().state_dict(), "state": self._whole_state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep this rank's part of a whole state, also an unsharded one's."""
        assert self.optim is not None
        parameters = [p for group in self.param_groups for p in group["params"]]
        owners = {i: self._owner[p] for i, p in enumerate(parameters)}
        state = state_dict["state"].items()
        part = {i: values for i, values in state if owners.get(i) == self.rank}
        super().load_state_dict({**state_dict, "state": part})
        self.optim.state = self.state
        self._whole_state = None


def to_host(state: dict[str, Any]) -> dict[str, Any]:
    """Tensors in CPU memory, all other values as they are."""
    tensors = {k: v.cpu() for k, v in state.items() if isinstance(v, Tensor)}
    return {**state, **tensors}
