"""`DistributedDataParallel`: backward leaves the same mean gradient everywhere.

forward ─► backward ─► hook of each parameter, when its gradient is ready
                         │ copies it into its bucket, one flat buffer
                         ▼
                       bucket full: its all-reduce starts, backward goes on
                         ▼
                       last bucket: wait for all; `.grad` is the mean
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils import _pytree as pytree

from miniddp import replicate
from miniddp.ddp import checks
from miniddp.ddp.reducer import Reducer
from miniddp.ddp.unused import CheckingReducer, SearchingReducer
from miniddp.hooks import Hook
from miniddp.process import check_group


class DistributedDataParallel(nn.Module):
    """Replicate `module` on all ranks; average its gradients during backward.

    Arguments, their order and defaults are torch's; one that is not described
    here has no effect, as in torch, or raises `NotImplementedError`.

    Args:
        device_ids: the GPU of the module; inputs are then moved to it.
        init_sync: copy rank 0's parameters and buffers to all ranks.
        bucket_cap_mb: send a bucket when it has reached this size, in MiB.
            None: 25, and 1 for the first one, which thus leaves early.
        find_unused_parameters: search each graph for parameters without use.
        check_reduction: ask all ranks what they lack, then send: no overlap.
        gradient_as_bucket_view: let `.grad` be a view: saves a copy of all.
        forward_sync_buffers (was broadcast_buffers): copy rank 0's each time.

    Raises `RuntimeError` without process group or anything to train, and in
    `forward` after a backward that left a gradient out; `ValueError` if the
    ranks' modules or options differ, or a device does not fit.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
    ) -> None:
        checks.refuse_options(locals())
        super().__init__()
        check_group(process_group)
        buffers_at_start, self.forward_sync_buffers = checks.buffer_sync(
            broadcast_buffers, forward_sync_buffers
        )
        if init_sync:
            shared = [
                f"bucket_cap_mb={bucket_cap_mb}",
                f"find_unused_parameters={find_unused_parameters}",
                f"check_reduction={check_reduction}",
                f"forward_sync_buffers={self.forward_sync_buffers}",
            ]
            checks.check_alike(module, process_group, buffers_at_start, shared)
            replicate.broadcast_module(
                module, process_group, buffers=buffers_at_start
            )
        checks.check_module(module, device_ids, output_device)
        self.module = module
        self.process_group = process_group or dist.group.WORLD
        self.has_buffers = any(True for _ in module.buffers())
        self.device_ids = device_ids
        self.find_unused_parameters = find_unused_parameters
        self.check_reduction = check_reduction
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.bucket_cap_mb = bucket_cap_mb
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.frozen = [
            (name, parameter)
            for name, parameter in module.named_parameters()
            if not parameter.requires_grad
        ]
        self.reducer = build_reducer(self)

    @_disable_dynamo(recursive=False)
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module; prepare for the backward pass that follows.

        `torch.compile` sees the module alone.
        """
        inputs, kwargs = self._pre_forward(inputs, kwargs)
        return self._post_forward(self.module(*inputs, **kwargs))

    @_disable_dynamo
    def _pre_forward(self, inputs: Any, kwargs: Any) -> tuple[Any, Any]:
        if torch.is_grad_enabled():
            checks.check_frozen(self.frozen)
            self.reducer.rebuild_buckets()
        sync_buffers = self.forward_sync_buffers and self.has_buffers
        if sync_buffers and self.require_forward_param_sync:
            buffers = self.module.buffers()
            replicate.broadcast_coalesced(buffers, self.process_group)
        if self.device_ids:
            to = {"device": self.device_ids[0], "non_blocking": True}
            move = partial(pytree.tree_map_only, Tensor, lambda t: t.to(**to))
            return move(inputs), move(kwargs)
        return inputs, kwargs

    @_disable_dynamo
    def _post_forward(self, output: Any) -> Any:
        sync = torch.is_grad_enabled() and self.require_backward_grad_sync
        self.require_forward_param_sync = sync
        return self.reducer.prepare_for_backward(output) if sync else output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forward and backward inside accumulate; the next ones average."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def join(self, *_: Any, **__: Any) -> NoReturn:
        """Not here: raises `NotImplementedError`, also for torch's `Join`."""
        raise NotImplementedError(checks.NO_JOIN)

    join_hook = join

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Let `hook(state, bucket)` average the buckets: see `miniddp.hooks`.

        Raises `TypeError`, `ValueError`; for a second hook `RuntimeError`.
        """
        checks.check_hook(hook, self.reducer.comm_hook)
        self.reducer.comm_hook = hook, state

    def __getstate__(self) -> dict[str, Any]:
        checks.check_default_group(self.process_group)
        return {**vars(self), "process_group": None, "reducer": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.process_group = dist.group.WORLD
        self.reducer = build_reducer(self)


def build_reducer(ddp: DistributedDataParallel) -> Reducer:
    kind: Callable[..., Reducer] = Reducer
    if ddp.find_unused_parameters:
        kind = SearchingReducer
    elif ddp.check_reduction:
        kind = CheckingReducer
    # A model may hide some in its own `named_parameters`. Backward does not.
    named = partial(nn.Module.named_parameters, ddp.module)
    return kind(
        [(name, p) for name, p in named() if p.requires_grad],
        group=ddp.process_group,
        cap_mb=ddp.bucket_cap_mb,
        as_views=ddp.gradient_as_bucket_view,
        current=lambda: (p for _, p in named()),
    )
