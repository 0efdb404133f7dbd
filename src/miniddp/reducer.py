"""The engine of DDP: watches gradients become ready and averages them, bucket by bucket."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from instruments.timeline import Timeline
from miniddp.bucket import Bucket, build_buckets, plan_buckets, shares_memory
from miniddp.gradient_hooks import check_gradient, watch
from miniddp.hooks import check_future, wait_for

CommHook = Callable[[Any, Any], torch.futures.Future[Any]]
"""`hook(state, bucket)` returns a future of the averaged buffer."""


@dataclass
class Forward:
    """One forward pass, and whether its gradients have been synchronised."""

    synchronised: bool = False


class Reducer:
    """Averages the gradients of `parameters` over `group` while backward still runs.

    One hook per parameter fires when autograd has accumulated its gradient. The hook copies the
    gradient into its bucket. A full bucket is sent at once, in the same order on every rank.
    A callback at the end of backward waits for what is still under way.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        control_group: dist.ProcessGroup,
        cap_bytes: int,
        first_cap_bytes: int,
        gradient_as_bucket_view: bool,
        find_unused_parameters: bool,
    ) -> None:
        self.names = list(names)
        self.parameters = list(parameters)
        self.group = group
        self.control_group = control_group
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.find_unused_parameters = find_unused_parameters
        self.timeline: Timeline | None = None
        self._caps = cap_bytes, first_cap_bytes
        self._world_size = dist.get_world_size(group)
        self._scale = 1 / self._world_size
        self._comm_hook: tuple[CommHook, Any] | None = None
        self._first_order: list[int] = []
        self._rebuilt = False
        self._armed = False
        self._underway: list[tuple[Bucket, Any]] = []
        self._touched = [0] * len(self.parameters)
        self._build(list(reversed(range(len(self.parameters)))))
        self._start_over()
        watch(self, self.parameters)

    def _build(self, order: Sequence[int]) -> None:
        plan = plan_buckets(
            [p.numel() * p.element_size() for p in self.parameters],
            [(p.dtype, p.device) for p in self.parameters],
            order,
            *self._caps,
        )
        self.buckets = build_buckets(plan, self.parameters)
        self._bucket_of: dict[int, Bucket] = {}
        self._view_of: dict[int, Tensor] = {}
        for bucket in self.buckets:
            for i, view in zip(bucket.indices, bucket.gradients(), strict=True):
                self._bucket_of[i] = bucket
                self._view_of[i] = view

    def set_comm_hook(self, hook: CommHook, state: Any) -> None:
        """Let `hook` do the communication. From now on it also divides by the world size."""
        if self._comm_hook:
            raise RuntimeError("register_comm_hook can only be called once: a hook is registered")
        self._comm_hook = hook, state
        self._scale = 1.0

    # Before and during backward

    def prepare(self, synchronise: bool) -> None:
        """A forward pass begins; `synchronise` says whether its backward shall average."""
        if synchronise:
            self._rebuild_in_ready_order()
        self._start_over()
        self._armed = synchronise
        if synchronise and self.timeline:
            self.timeline.next_step()

    def _start_over(self) -> None:
        while self._underway:  # from a backward pass that ended in an error
            self._underway.pop()[1].wait()
        for bucket in self.buckets:
            bucket.pending = len(bucket.indices)
        self._ready = [False] * len(self.parameters)
        self._ready_order: list[int] = []
        self._backwards: list[Forward] = []
        self._callback_queued = False

    def begin_backward(self, forward: Forward) -> None:
        """Backward has reached the output of a forward pass."""
        if not self._is_concerned():
            return
        if not self._armed:
            if forward.synchronised:
                raise RuntimeError(
                    "backward ran again through a forward pass whose gradients are synchronised "
                    "already: call the model again first, or run the first backward (and its "
                    "forward) inside no_sync()"
                )
            self._start_over()
            self._armed = True
        self._backwards.append(forward)
        self._queue_finalize()

    def _is_concerned(self) -> bool:
        """Whether this pass shall reach the parameters: not in `torch.autograd.grad` and not while
        all of them are frozen, as a GAN's discriminator is. Of `inputs=` the hooks will tell.
        """
        reaches_all_leaves = torch.autograd._is_checkpoint_valid()  # type: ignore[no-untyped-call]
        return reaches_all_leaves and any(p.requires_grad for p in self.parameters)

    def _queue_finalize(self) -> None:
        """Have `finalize` called at the end of the backward pass that is running."""
        if self._callback_queued:
            return
        self._callback_queued = True
        torch.autograd.Variable._execution_engine.queue_callback(self.finalize)  # type: ignore[attr-defined]

    def on_gradient(self, i: int, parameter: Tensor) -> None:
        """Gradient i has been accumulated."""
        self._touched[i] = 1
        if not self._armed:
            return
        self._check(i, parameter)
        self._queue_finalize()
        self._put_into_bucket(i, parameter)
        self._launch_full_buckets()

    def _check(self, i: int, parameter: Tensor) -> None:
        if self._ready[i]:
            raise RuntimeError(
                f"gradient of {self.names[i]!r} became ready twice in one backward pass: "
                "a re-entrant checkpoint uses the parameter more than once; "
                "pass use_reentrant=False to torch.utils.checkpoint.checkpoint"
            )
        check_gradient(self.names[i], parameter, self._view_of[i])

    def _put_into_bucket(self, i: int, parameter: Tensor) -> None:
        view, gradient = self._view_of[i], parameter.grad
        if gradient is None:
            view.zero_()
        elif shares_memory(gradient, view):
            view.mul_(self._scale)
        else:
            torch.mul(gradient, self._scale, out=view)
            if self.gradient_as_bucket_view:
                parameter.grad = view.detach()
        self._ready[i] = True
        self._ready_order.append(i)
        bucket = self._bucket_of[i]
        bucket.pending -= 1
        if self.timeline and bucket.pending == 0:
            self.timeline.mark(bucket, "ready")

    def _launch_full_buckets(self) -> None:
        while len(self._underway) < len(self.buckets):
            bucket = self.buckets[len(self._underway)]
            if bucket.pending > 0:
                return
            self._underway.append((bucket, self._launch(bucket)))

    def _launch(self, bucket: Bucket) -> Any:
        if self.timeline:
            self.timeline.mark(bucket, "launched")
        if self._comm_hook:
            hook, state = self._comm_hook
            work: Any = check_future(hook(state, bucket))
        else:
            work = dist.all_reduce(bucket.buffer(), group=self.group, async_op=True)
        if self.timeline:
            self.timeline.mark_when_done(bucket, work)
        return work

    # At the end of backward

    @torch.no_grad()
    def finalize(self) -> None:
        """Send what is left, wait for every bucket, and give each parameter its mean gradient.

        Raises RuntimeError, on every rank, if a parameter got no gradient on some rank.
        """
        if not self._armed:
            return
        for i, parameter in enumerate(self.parameters):
            if not self._ready[i]:
                self._put_into_bucket(i, parameter)
        self._launch_full_buckets()
        for bucket, work in self._underway:
            wait_for(work, bucket)
        self._underway = []
        used = torch.tensor(self._touched)
        dist.all_reduce(used, group=self.control_group)
        for forward in self._backwards:
            forward.synchronised = True
        self._touched = [0] * len(self.parameters)
        self._armed = False
        self._first_order = self._first_order or list(self._ready_order)
        counts = used.tolist()
        if not self.find_unused_parameters and min(counts) < self._world_size:
            raise RuntimeError(unused_message(self.names, counts, self._world_size))
        for i, parameter in enumerate(self.parameters):
            if counts[i] > 0 and not shares_memory(parameter.grad, self._view_of[i]):
                self._give_gradient(i, parameter)

    def _give_gradient(self, i: int, parameter: nn.Parameter) -> None:
        view = self._view_of[i]
        if self.gradient_as_bucket_view:
            parameter.grad = view.detach()
        elif parameter.grad is None:
            parameter.grad = view.clone()
        else:
            parameter.grad.copy_(view)

    # After the first backward

    def _rebuild_in_ready_order(self) -> None:
        if self._rebuilt or not self._first_order or self.find_unused_parameters:
            return
        order = torch.tensor(self._first_order)
        dist.broadcast(order, group=self.control_group, group_src=0)
        old_views = self._view_of
        self._build(order.tolist())
        for i, parameter in enumerate(self.parameters):
            if shares_memory(parameter.grad, old_views[i]):
                parameter.grad = self._view_of[i].copy_(old_views[i]).detach()
        self._rebuilt = True


def unused_message(names: Sequence[str], counts: Sequence[int], world_size: int) -> str:
    """Which parameters got a gradient on fewer than all ranks."""
    missing = [
        f"{name!r} (on {world_size - count} of {world_size} ranks)"
        for name, count in zip(names, counts, strict=True)
        if count < world_size
    ]
    return (
        f"{len(missing)} parameter(s) got no gradient in this backward pass: "
        f"{', '.join(missing[:10])}{', …' if len(missing) > 10 else ''}. "
        "Use every parameter in the loss, freeze it before wrapping, "
        "or pass find_unused_parameters=True"
    )
