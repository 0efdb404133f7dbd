"""`DistributedDataParallel`: a module whose backward leaves the same mean gradient everywhere."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from miniddp.bucket import MIB
from miniddp.gradient_hooks import check_not_watched
from miniddp.process import check_group
from miniddp.reducer import CommHook, Forward, Reducer
from miniddp.replicate import broadcast_module, verify_replicas


class DistributedDataParallel(nn.Module):
    """Replicate `module` on every rank of a group and average its gradients during backward.

    After `loss.backward()` every rank holds the mean of all ranks' gradients, so that the
    training loop stays what it was on one process.

    Args:
        module: the model, on the device on which it will train.
        process_group: the ranks that train together; the default group if None.
        bucket_cap_mb: a bucket of gradients is sent when it has reached this size, in MiB.
        first_bucket_mb: the same for the first bucket, in MiB: small, to start early.
        gradient_as_bucket_view: let `.grad` be a view into the bucket, which saves the memory
            of one copy of all gradients.
        find_unused_parameters: accept parameters that get no gradient. They hold up the buckets
            behind them until the end of backward.
        init_sync: copy rank 0's parameters and buffers to all ranks. Without it the ranks must
            hold equal values already.
        forward_sync_buffers: copy rank 0's buffers to all ranks before a forward pass.
        device_ids: as in torch: None, or the one device on which the module lies.
        broadcast_buffers: torch's earlier name of forward_sync_buffers; None leaves it to that.

    Raises:
        RuntimeError: no process group; no parameter that requires a gradient; and, from
            `backward`, a parameter without gradient, a sparse gradient, a second backward.
        ValueError: replicas of different structure; a module that is wrapped already; a device
            for which the group has no backend.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float = 25,
        first_bucket_mb: float = 1,
        gradient_as_bucket_view: bool = True,
        find_unused_parameters: bool = False,
        init_sync: bool = True,
        forward_sync_buffers: bool = True,
        *,
        device_ids: Sequence[int | torch.device] | None = None,
        broadcast_buffers: bool | None = None,
    ) -> None:
        super().__init__()
        group = _group(process_group)
        if init_sync:
            verify_replicas(module, group, values=False)
        names, parameters = _trainable(module)
        _check_devices(module, group, device_ids)
        check_not_watched(names, parameters)
        if init_sync:
            broadcast_module(module, group)
        self.module = module
        self.process_group = group
        if broadcast_buffers is not None:
            forward_sync_buffers = broadcast_buffers
        self.forward_sync_buffers = forward_sync_buffers
        self.require_backward_grad_sync = True
        self._require_forward_sync = True
        self._reducer_options: dict[str, Any] = {
            "cap_bytes": int(bucket_cap_mb * MIB),
            "first_cap_bytes": int(first_bucket_mb * MIB),
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "find_unused_parameters": find_unused_parameters,
        }
        self.reducer = Reducer(
            names, parameters, group, _control_group(group), **self._reducer_options
        )

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copy.deepcopy. The copy is of the default group and has no hook."""
        if self.process_group is not dist.group.WORLD:
            raise RuntimeError(
                "a DistributedDataParallel of a group other than the default one cannot be copied "
                "or pickled: copy its module and wrap the copy"
            )
        left_out = "process_group", "reducer"
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.process_group = group = _group(None)
        self.reducer = Reducer(
            *_trainable(self.module), group, _control_group(group), **self._reducer_options
        )

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module; prepare for the backward pass that follows."""
        if self.forward_sync_buffers and self._require_forward_sync:
            self._broadcast_buffers()
        synchronise = torch.is_grad_enabled() and self.require_backward_grad_sync
        self._require_forward_sync = synchronise
        if torch.is_grad_enabled():
            self.reducer.prepare(synchronise)
        output = self.module(*inputs, **kwargs)
        if synchronise:
            self._watch(output)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forward and backward inside only accumulate gradients on their own rank.

        The first forward and backward outside average what has been accumulated.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Let `hook(state, bucket)` reduce the buckets; it returns a future of the mean.

        `bucket` has the methods of `torch.distributed.GradBucket`, and the buffer holds this
        rank's gradients, not yet divided: torch's own hooks work unchanged.
        """
        if not callable(hook):
            raise TypeError(f"hook must be callable, not {type(hook).__name__}")
        self.reducer.set_comm_hook(hook, state)

    def _broadcast_buffers(self) -> None:
        works = [
            dist.broadcast(buffer, group=self.process_group, group_src=0, async_op=True)
            for buffer in self.module.buffers()
        ]
        for work in works:
            work.wait()

    def _watch(self, output: Any) -> None:
        forward = Forward()
        reducer = self.reducer
        for tensor in _tensors(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(lambda _: reducer.begin_backward(forward))


def _group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    check_group(process_group)
    group = process_group or dist.group.WORLD
    assert group is not None
    return group


def _trainable(module: nn.Module) -> tuple[list[str], list[nn.Parameter]]:
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    if not named:
        raise RuntimeError("no parameter of the module requires a gradient: nothing to synchronise")
    return [name for name, _ in named], [p for _, p in named]


def _check_devices(
    module: nn.Module,
    group: dist.ProcessGroup,
    device_ids: Sequence[int | torch.device] | None,
) -> None:
    backends = dist.get_backend_config(group)
    wanted = {torch.device("cuda", d) if isinstance(d, int) else d for d in device_ids or ()}
    for name, parameter in module.named_parameters():
        if f"{parameter.device.type}:" not in backends:
            raise ValueError(
                f"parameter {name!r} is on {parameter.device}, for which the process group has "
                f"no backend (it has {backends}): move the module before wrapping it"
            )
        if wanted and parameter.device not in wanted:
            raise ValueError(
                f"parameter {name!r} is on {parameter.device}, but device_ids is {device_ids}"
            )


def _control_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks that carries CPU tensors, so that control never waits for a GPU."""
    if "cpu:" in dist.get_backend_config(group):
        return group
    ranks = dist.get_process_group_ranks(group)
    control: dist.ProcessGroup = dist.new_group(
        ranks, backend="gloo", use_local_synchronization=True
    )
    return control


def _tensors(output: Any) -> Iterator[Tensor]:
    """Every tensor in nested lists, tuples, dictionaries and dataclasses."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _tensors(value)
    elif is_dataclass(output) and not isinstance(output, type):
        for field in fields(output):
            yield from _tensors(getattr(output, field.name))
