"""The reducer: collects gradients in buckets, sends them, gives the mean back.

Streams. On a GPU autograd runs backward on the streams of forward, and calls
the hooks on them (torch.autograd, "Stream semantics of backward passes"). There
`fill` queues its copies, so a bucket is filled behind the kernels that compute
its gradients. NCCL works on a stream of its own: an asynchronous all-reduce
makes it wait for the stream that filled the bucket (ProcessGroupNCCL.cpp,
syncStream), and `work.wait()` in `finish` makes backward's stream wait for it:
Python goes on at once. The copies back are queued behind that. Nothing needs
`record_stream`: a bucket is allocated once and lives as long as its reducer,
and each use of it waits for the one before. A communication hook is called on
the stream that filled the bucket; what it queues elsewhere has to wait for that
stream, and the future that it returns stands for all that it has queued.
"""

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from miniddp.bucket import (
    Bucket,
    build_buckets,
    dense_stride,
    same_memory,
)
from miniddp.ddp import checks, errors
from miniddp.ddp.autograd import after_backward, call, node_of, remove_all
from miniddp.ddp.outputs import tensors_with_graph
from miniddp.hooks import Hook, wait_for


class Reducer:
    """Averages the gradients of some parameters while backward runs.

    Args:
        named_parameters: names and parameters, all of which get a gradient.
        group: the ranks that average.
        cap_mb: a bucket is sent when it has reached this size, in MiB, or None.
        as_views: let each `.grad` be a view of its bucket.
        current: gives the module's parameters as they are now.
        rebuild: after the first backward, plan the buckets in its order.
    """

    cures = errors.CURES

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, Tensor]],
        group: dist.ProcessGroup,
        cap_mb: float | None,
        as_views: bool,
        current: Callable[[], Iterable[Tensor]],
        rebuild: bool = True,
    ) -> None:
        self.names = [name for name, _ in named_parameters]
        self.parameters = [parameter for _, parameter in named_parameters]
        self.kinds = [(p.dtype, p.device) for p in self.parameters]
        self.strides = [dense_stride(p) for p in self.parameters]
        self.current = current
        self.group = group
        self.world_size = dist.get_world_size(group)
        self.cap_mb = cap_mb
        self.as_views = as_views
        self.rebuilt = not rebuild
        self.comm_hook: tuple[Hook, Any] | None = None
        self.lock = threading.RLock()  # backward has a thread for each device
        self.expecting = False  # forward has asked for a mean
        self.in_backward = False
        self.backwards = 0  # that have ended since forward
        self.too_late = False  # this one's gradients are averaged already
        self.ready: list[int] = []  # parameters, in order
        self.without: set[int] = set()  # these have come, without a gradient
        self.first_order: list[int] = []
        self.launched: list[tuple[Bucket, Any]] = []
        self.unused_everywhere: set[int] = set()
        self.at_output = partial(call, weakref.WeakMethod(self.begin_backward))
        self.new_buckets(sys.maxsize if rebuild else cap_mb)
        self.add_hooks()

    def new_buckets(self, cap_mb: float | None) -> None:
        self.buckets = build_buckets(
            self.parameters, self.strides, cap_mb, self.first_order
        )
        self.bucket_of = {
            i: bucket for bucket in self.buckets for i in bucket.indices
        }
        self.places = {
            address for bucket in self.buckets for address in bucket.addresses
        }

    def add_hooks(self) -> None:
        """Have `mark_ready` called when a parameter's gradient is complete.

        The hooks stand behind the nodes that accumulate, so that they run after
        all hooks of tensors, whenever a user registers these.
        """
        self.nodes = [node_of(parameter) for parameter in self.parameters]
        reducer = weakref.proxy(self)  # hooks do not keep the reducer alive
        handles = []
        for number, node in enumerate(self.nodes):

            def hook(_: Any, gradients: Any, i: int = number) -> None:
                if gradients[0] is None:
                    reducer.without.add(i)
                reducer.mark_ready(i)

            handles.append(node.register_hook(hook))
        weakref.finalize(self, remove_all, handles)

    def prepare_for_backward(self, output: Any) -> Any:
        """Forward has ended, and its backward shall average."""
        self.expecting = True
        self.in_backward = False
        self.backwards = 0
        self.ready = []
        self.without.clear()
        launched = self.launched
        self.launched = []
        for bucket, work in launched:  # after an error in backward
            wait_for(work, bucket)
        for bucket in self.buckets:
            bucket.pending = set(bucket.indices)
        for tensor in tensors_with_graph(output):
            hooks = tensor._backward_hooks or {}
            if self.at_output not in hooks.values():  # else one kept by a user
                tensor.register_hook(self.at_output)
        return output

    def begin_backward(self) -> None:
        """Backward has reached an output of forward."""
        with self.lock:
            if self.in_backward:
                return
            self.in_backward = True
            self.too_late = not self.expecting
            after_backward(self.end_backward)

    def end_backward(self) -> None:
        self.in_backward = False
        self.too_late = False
        self.backwards += 1
        if self.expecting and len(self.launched) < len(self.buckets):
            self.check_parameters(range(len(self.parameters)))

    def check_parameters(self, indices: Iterable[int]) -> None:
        """Raise unless they are what was wrapped: others have no hook."""
        current = set(self.current())
        for i in indices:
            parameter = self.parameters[i]
            checks.check_parameter(
                self.names[i], parameter, self.kinds[i], parameter in current
            )
            if parameter.requires_grad and node_of(parameter) != self.nodes[i]:
                raise errors.converted_back(self.names[i])

    def mark_ready(self, i: int) -> None:
        """Autograd has accumulated the gradient of parameter i."""
        if not self.expecting:
            if self.too_late:
                raise errors.averaged_already()
            if self.in_backward:  # the means came before all of it was done
                raise errors.ready_twice(self.names[i], in_another_pass=False)
            return
        pending = self.bucket_of[i].pending
        if i not in pending:
            raise errors.ready_twice(self.names[i], self.backwards > 0)
        pending.remove(i)
        self.ready.append(i)
        if not pending:
            self.launch_full_buckets()

    def launch_full_buckets(self) -> None:
        """Launch in the same order on every rank, whichever is full first."""
        with self.lock:
            to_launch = self.buckets[len(self.launched) :]
            for bucket in to_launch:
                if bucket.pending:
                    return
                self.fill(bucket)
                self.launched.append((bucket, self.launch(bucket)))
            if to_launch:
                after_backward(self.finish)

    def fill(self, bucket: Bucket) -> None:
        """Copy the gradients into the bucket and divide them, all at once."""
        parameters = bucket.parameters()
        views = bucket.gradients()
        gradients = [
            self.zeros(i, view)
            if (gradient := parameter.grad) is None
            else gradient
            for i, parameter, view in zip(
                bucket.indices, parameters, views, strict=True
            )
        ]
        checks.check_gradients(self.names, bucket, gradients)
        if self.as_views:
            self.check_places(bucket, gradients)
        torch._foreach_copy_(views, gradients)
        if not self.comm_hook:  # else the hook divides
            bucket.buffer().mul_(1 / self.world_size)
        if self.as_views:
            self.point_to_bucket(bucket, gradients)

    def zeros(self, i: int, view: Tensor) -> Tensor:
        """What stands in the bucket for a parameter without a gradient.

        Raises if it had one, and no hook of its own that may have used it.
        """
        own_hooks = self.parameters[i]._post_accumulate_grad_hooks
        if i not in self.without and not own_hooks:
            raise errors.used_up(self.names[i])
        return view.zero_()

    def check_places(self, bucket: Bucket, gradients: Sequence[Tensor]) -> None:
        """Raise for one that lies where another gradient goes."""
        addresses = [gradient.data_ptr() for gradient in gradients]
        if self.places.isdisjoint(addresses) or addresses == bucket.addresses:
            return
        for i, address, place in zip(
            bucket.indices, addresses, bucket.addresses, strict=True
        ):
            if address != place and address in self.places:
                raise errors.not_the_view(self.names[i])

    def point_to_bucket(
        self, bucket: Bucket, gradients: Sequence[Tensor]
    ) -> None:
        """Let each `.grad` that there is lie in the bucket."""
        bucket.renew_aliases()
        for parameter, gradient, view, alias in zip(
            bucket.parameters(),
            gradients,
            bucket.gradients(),
            bucket.aliases(),
            strict=True,
        ):
            if gradient is not view:  # the view stands for None
                parameter.grad = alias

    def launch(self, bucket: Bucket) -> Any:
        """Start to average the bucket; what to wait for."""
        if self.comm_hook:
            hook, state = self.comm_hook
            return hook(state, copy(bucket))  # it may set the buffer
        return dist.all_reduce(bucket.buffer(), group=self.group, async_op=True)

    @torch.no_grad()
    def finish(self) -> None:
        """Backward is done: wait; let every `.grad` be the mean."""
        launched = self.launched
        self.launched = []
        self.expecting = False
        self.first_order = self.first_order or self.ready
        for bucket, work in launched:
            wait_for(work, bucket)
            self.give_back(bucket)

    def give_back(self, bucket: Bucket) -> None:
        """Let `.grad` be the mean, for all parameters of the bucket at once."""
        gradients = []
        means = []
        for i, parameter, view, alias in zip(
            bucket.indices,
            bucket.parameters(),
            bucket.gradients(),
            bucket.aliases(),
            strict=True,
        ):
            gradient = parameter.grad
            if gradient is alias or i in self.unused_everywhere:
                continue
            if gradient is None:
                parameter.grad = alias if self.as_views else view.clone()
            elif not self.as_views:
                gradients.append(gradient)
                means.append(view)
            elif not same_memory(gradient, view):
                raise errors.not_the_view(self.names[i])
        if gradients:
            copy_all(gradients, means)

    @torch.no_grad()
    def rebuild_buckets(self) -> None:
        """After the first backward: buckets in the order of rank 0's hooks."""
        if self.expecting and self.ready:
            self.expecting = False
            self.in_backward = False
            raise errors.not_finished(self.names, set(self.ready), self.cures)
        if self.rebuilt or not self.first_order:
            return
        with torch._C._DisableFuncTorch():  # forward may be in a transform
            self.build_in_order_of_rank_0()

    def build_in_order_of_rank_0(self) -> None:
        device = self.parameters[0].device
        order = torch.tensor(self.first_order, device=device)
        dist.broadcast(order, group=self.group, group_src=0)
        self.first_order = order.tolist()
        before = views_of(self.buckets)
        self.new_buckets(self.cap_mb)
        self.rebuilt = True
        for i, view in views_of(self.buckets).items():
            gradient = self.parameters[i].grad
            if gradient is not None and same_memory(gradient, before[i]):
                self.parameters[i].grad = view.copy_(gradient).detach()


def views_of(buckets: Sequence[Bucket]) -> dict[int, Tensor]:
    return {
        i: view
        for bucket in buckets
        for i, view in zip(bucket.indices, bucket.gradients(), strict=True)
    }


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    try:
        torch._foreach_copy_(targets, sources)
    except RuntimeError:  # a target is conjugated, or negated, lazily
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
