"""One training step, with any of three ways to average the gradients."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, profiler
from torch.amp import GradScaler
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.profiler import record_function

from finetune.data import Batch, to_device
from finetune.options import Options
from miniddp.ddp import DistributedDataParallel
from miniddp.naive import SimpleDDP
from miniddp.process import device

WRAPPERS: dict[str, Any] = {
    "simple": SimpleDDP,
    "miniddp": DistributedDataParallel,
    "torch": nn.parallel.DistributedDataParallel,
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def train_step(
    model: Any,
    optimizer: Optimizer,
    batches: Sequence[Batch],
    weights: Sequence[float] | None = None,
    amp: str = "off",
    scaler: GradScaler | None = None,
    clip: float | None = None,
) -> Tensor:
    """One update of the weights, from this rank's micro-batches.

    `weights` multiply their mean losses; without, each counts the same. `amp`
    is what autocast computes in: "off", "bf16", or "fp16" with a `scaler`.
    `clip` is the largest norm of the averaged gradient.

    Returns the rank's loss before the update, a scalar on the device.
    """
    scaler = scaler or GradScaler(enabled=False)
    weights = weights or [1 / len(batches)] * len(batches)
    losses = []
    with model.no_sync():
        for batch, weight in zip(batches[:-1], weights[:-1], strict=True):
            losses.append(accumulate(model, batch, weight, amp, scaler))
    losses.append(accumulate(model, batches[-1], weights[-1], amp, scaler))
    with record_function("sync_grads"):
        if isinstance(model, SimpleDDP):  # the DDPs have, during backward
            model.sync_gradients()
    with record_function("opt_step"):
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return torch.stack(losses).sum()


def accumulate(
    model: Any, batch: Batch, weight: float, amp: str, scaler: GradScaler
) -> Tensor:
    """Add the gradients of a micro-batch's weighted loss to those there."""
    with record_function("data_movement"):
        batch = to_device(batch)
    half = torch.autocast(device().type, DTYPES.get(amp), enabled=amp in DTYPES)
    with record_function("forward"), half:
        loss: Tensor = model(**batch).loss.float() * weight
    with record_function("backward"):
        scaler.scale(loss).backward()
    return loss.detach()


def rebuild_buckets(model: Any, optimizer: Optimizer, batch: Batch) -> None:
    """Let a DDP arrange its buckets for good, before a checkpoint is loaded.

    It does so after its first backward. Where a gradient lies in its bucket
    decides, for three ranks or more, in which order theirs are added, and so
    the last bits of the sum. The gradients of `batch` are thrown away.
    """
    model(**to_device(batch)).loss.backward()
    optimizer.zero_grad()


def build_optimizer(module: nn.Module, options: Options) -> tuple[AdamW, LambdaLR]:
    """AdamW, and its learning rate: a linear warm-up from 0, then the same."""
    from transformers import get_constant_schedule_with_warmup

    optimizer = AdamW(module.parameters(), lr=options.lr)
    scheduler = get_constant_schedule_with_warmup(optimizer, options.warmup)
    return optimizer, scheduler


def tracing(folder: str | None) -> AbstractContextManager[Any]:
    """A profiler of rank 0's steps 8 to 12, counted from 0, into `folder`."""
    if folder is None or dist.get_rank() != 0:
        return nullcontext()
    phases = profiler.schedule(skip_first=5, wait=1, warmup=2, active=5, repeat=1)
    write = profiler.tensorboard_trace_handler(folder, "rank0", use_gzip=True)
    return profiler.profile(schedule=phases, on_trace_ready=write)


def check_amp(amp: str) -> None:
    """Raise `ValueError` if this rank's device does not compute in `amp`."""
    on_gpu = device().type == "cuda"
    if amp == "fp16" and not on_gpu:
        raise ValueError("--amp fp16 needs a GPU: use bf16 or off")
    if amp == "bf16" and on_gpu and not torch.cuda.is_bf16_supported():
        raise ValueError("--amp bf16: this GPU has none, use fp16 or off")
