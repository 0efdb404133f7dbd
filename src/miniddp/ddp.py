"""`DistributedDataParallel`: backward leaves the same mean gradient everywhere.

forward ─► backward ─► hook of each parameter, when its gradient is ready
                         │ copies it into its bucket, one flat buffer
                         ▼
                       bucket full: its all-reduce starts, backward goes on
                         ▼
                       last bucket: wait for all; `.grad` is the mean
"""

import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from miniddp import checks, replicate
from miniddp.bucket import Bucket, build_buckets, same_memory
from miniddp.hooks import Hook, wait_for
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
    ranks' modules differ or a device does not fit.
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
        at_start, self.forward_sync_buffers = checks.buffer_sync(
            broadcast_buffers, forward_sync_buffers
        )
        if init_sync:
            replicate.verify_replicas(module, process_group, values=False)
            replicate.broadcast_module(module, process_group, 0, at_start)
        checks.check_module(module, device_ids, output_device)
        self.module = module
        self.process_group = process_group or dist.group.WORLD
        self.device_ids = device_ids
        self.find_unused_parameters = find_unused_parameters
        self.check_reduction = check_reduction
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self.bucket_cap_mb = bucket_cap_mb
        self.reducer = build_reducer(self)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module; prepare for the backward pass that follows."""
        if torch.is_grad_enabled():
            self.reducer.rebuild_buckets()
        if self.forward_sync_buffers and self.require_forward_param_sync:
            buffers = self.module.buffers()
            replicate.broadcast_coalesced(buffers, self.process_group)
        if self.device_ids:
            to = {"device": self.device_ids[0], "non_blocking": True}
            move = partial(pytree.tree_map_only, Tensor, lambda t: t.to(**to))
            inputs, kwargs = move(inputs), move(kwargs)
        output = self.module(*inputs, **kwargs)
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


class Reducer:
    """Puts gradients into buckets and averages them while backward runs."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        named = ddp.module.named_parameters()
        trained = {name: p for name, p in named if p.requires_grad}
        self.names, self.parameters = list(trained), list(trained.values())
        self.group = ddp.process_group
        self.world_size = dist.get_world_size(self.group)
        self.as_views = ddp.gradient_as_bucket_view
        self.cap_mb = ddp.bucket_cap_mb
        self.comm_hook: tuple[Hook, Any] | None = None
        self.lock = threading.RLock()  # backward has a thread for each device
        self.expecting = False
        self.rebuilt = ddp.find_unused_parameters  # then orders may change
        self.ready: dict[int, None] = {}  # parameters, in order
        self.first_order: list[int] = []
        self.launched: list[tuple[Bucket, Any]] = []
        self.new_buckets(self.cap_mb if self.rebuilt else sys.maxsize)
        me = weakref.proxy(self)  # hooks do not keep the reducer alive
        for i, parameter in enumerate(self.parameters):
            add_hook: Any = parameter.register_post_accumulate_grad_hook
            handle = add_hook(lambda _, i=i: me.autograd_hook(i))
            weakref.finalize(self, handle.remove)

    def new_buckets(self, cap_mb: float | None) -> None:
        self.buckets = build_buckets(self.parameters, cap_mb, self.first_order)
        self.place_of = {}
        for bucket in self.buckets:
            for i, view in zip(bucket.indices, bucket.gradients(), strict=True):
                self.place_of[i] = bucket, view

    def prepare_for_backward(self, output: Any) -> Any:
        """Forward has ended, and its backward shall average."""
        self.expecting, self.ready = True, {}
        launched, self.launched = self.launched, []
        for bucket, work in launched:  # after an error in backward
            wait_for(work, bucket)
        for bucket in self.buckets:
            bucket.pending = len(bucket.indices)
        return output

    def autograd_hook(self, i: int) -> None:
        """Autograd has accumulated the gradient of parameter i."""
        if not self.expecting:
            return
        with self.lock:
            self.put_into_bucket(i)
            self.launch_full_buckets()

    def put_into_bucket(self, i: int) -> None:
        parameter, (bucket, view) = self.parameters[i], self.place_of[i]
        checks.check_gradient(self.names[i], parameter, view, i in self.ready)
        if parameter.grad is None:
            view.zero_()
        else:  # copy and divide in one pass; a communication hook divides
            share = 1 if self.comm_hook else 1 / self.world_size
            torch.mul(parameter.grad, share, out=view)
            if self.as_views:
                parameter.grad = view.detach()
        self.ready[i] = None
        bucket.pending -= 1

    def launch_full_buckets(self) -> None:
        """Launch in the same order on every rank, whichever is full first."""
        for bucket in self.buckets[len(self.launched) :]:
            if bucket.pending > 0:
                return
            self.launched.append((bucket, self.launch(bucket)))
        torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def launch(self, bucket: Bucket) -> Any:
        """Start to average the bucket; what to wait for."""
        if self.comm_hook:
            hook, state = self.comm_hook
            return hook(state, bucket)
        return dist.all_reduce(bucket.buffer(), group=self.group, async_op=True)

    @torch.no_grad()
    def finish(self) -> None:
        """Backward is done: wait; let every `.grad` be the mean."""
        launched, self.launched, self.expecting = self.launched, [], False
        self.first_order = self.first_order or list(self.ready)
        for bucket, work in launched:
            wait_for(work, bucket)
            for i in bucket.indices:
                self.give_mean(i)

    def give_mean(self, i: int) -> None:
        parameter, (_, view) = self.parameters[i], self.place_of[i]
        if same_memory(parameter.grad, view):
            return
        if self.as_views:
            parameter.grad = view.detach()
        elif parameter.grad is None:
            parameter.grad = view.clone()
        else:
            parameter.grad.copy_(view)

    @torch.no_grad()
    def rebuild_buckets(self) -> None:
        """After the first backward: buckets in the order of rank 0's hooks."""
        if self.expecting and self.ready:
            self.expecting = False
            raise checks.not_finished(self.names, self.ready)
        if self.rebuilt or not self.first_order:
            return
        order = torch.tensor(self.first_order).to(self.parameters[0].device)
        dist.broadcast(order, group=self.group, group_src=0)
        before, self.first_order = self.place_of, order.tolist()
        self.new_buckets(self.cap_mb)
        self.rebuilt = True
        for i, parameter in enumerate(self.parameters):
            if same_memory(parameter.grad, before[i][1]):
                view = self.place_of[i][1].copy_(before[i][1])
                parameter.grad = view.detach()


def build_reducer(ddp: DistributedDataParallel) -> Reducer:
    from miniddp import unused  # which imports this module

    if ddp.find_unused_parameters:
        return unused.SearchingReducer(ddp)
    return (unused.CheckingReducer if ddp.check_reduction else Reducer)(ddp)
