"""The reducer: puts gradients into buckets, sends them, gives the mean back."""

import sys
import threading
import weakref
from typing import Any

import torch
import torch.distributed as dist

from miniddp.bucket import Bucket, build_buckets, same_memory
from miniddp.ddp import checks
from miniddp.hooks import Hook, wait_for


class Reducer:
    """Puts gradients into buckets and averages them while backward runs."""

    def __init__(self, ddp: Any) -> None:
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
