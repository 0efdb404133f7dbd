"""A training step with all that a real training asks for: accumulation, half precision, clipping,
and any of three ways to average the gradients.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from instruments.clock import SyncClock, clock
from instruments.profiling import region
from miniddp.batches import Batch, to_device
from miniddp.ddp import DistributedDataParallel
from miniddp.naive import SimpleDDP
from miniddp.options import TrainingError
from miniddp.process import device
from miniddp.report import Step

WRAPPERS: dict[str, Any] = {
    "simple": SimpleDDP,
    "miniddp": DistributedDataParallel,
    "torch": nn.parallel.DistributedDataParallel,
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class TrainingStep:
    """One update of the weights from a list of micro-batches.

    Args:
        module: the model, on its device. `step.model` is its wrapper.
        optimizer: over the module's parameters.
        ddp: "simple", "miniddp" or "torch": the wrapper that averages the gradients.
        amp: "off", "bf16" or "fp16": what autocast computes in. The weights stay in float32.
        clip: the largest norm of the averaged gradient; None leaves it as it is.

    Raises:
        TrainingError: this device does not compute in `amp`.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        ddp: str = "simple",
        amp: str = "off",
        clip: float | None = None,
    ) -> None:
        check_amp(amp)
        self.sync_clock = SyncClock(module)  # first: its hooks come before those of the wrapper
        self.model = WRAPPERS[ddp](module)
        self.optimizer = optimizer
        self.amp = amp
        self.clip = clip
        self.scaler = torch.amp.GradScaler(device().type, enabled=amp == "fp16")

    def __call__(self, batches: Sequence[Batch], weights: Sequence[float] | None = None) -> Step:
        """Take the step.

        `weights` multiply the mean losses of the micro-batches. Without them all are taken to be
        of equal size, on every rank; where they are not, `accumulation.mean_weights` gives them.
        """
        start = clock()
        weights = weights or [1 / len(batches)] * len(batches)
        *first, last = zip(batches, weights, strict=True)
        with self.model.no_sync():
            losses = [self.accumulate(batch, weight) for batch, weight in first]
        losses.append(self.accumulate(*last))
        with region("sync_grads"):
            self.synchronise()
        sync_seconds = self.sync_clock.seconds()
        with region("opt_step"):
            self.update()
        return Step(torch.stack(losses).sum(), clock() - start, sync_seconds)

    def accumulate(self, batch: Batch, weight: float) -> torch.Tensor:
        """Add the gradients of a micro-batch's weighted loss to those that are there."""
        with region("data_movement"):
            batch = to_device(batch)
        with region("forward"), self.autocast():
            loss = self.model(**batch).loss.float() * weight
        with region("backward"):
            self.scaler.scale(loss).backward()
        detached: torch.Tensor = loss.detach()
        return detached

    def settle(self, batch: Batch) -> None:
        """Let a DDP arrange its buckets as it keeps them; call it before a checkpoint is restored.

        The first backward finds out the order in which gradients become ready. Where a gradient
        lies in its bucket decides, for three ranks or more, in which order theirs are added, and
        so the last bits of the sum. The gradients of `batch` are thrown away.
        """
        if not isinstance(self.model, SimpleDDP):
            self.accumulate(batch, 1.0)
            self.optimizer.zero_grad()

    def autocast(self) -> AbstractContextManager[Any]:
        """Half precision for what is computed within it, where that was asked for."""
        return (
            torch.autocast(device().type, DTYPES[self.amp]) if self.amp in DTYPES else nullcontext()
        )

    def synchronise(self) -> None:
        """Average the gradients; the DDPs have done so during the last backward."""
        if isinstance(self.model, SimpleDDP):
            self.model.sync_gradients()

    def update(self) -> None:
        """Clip the averaged gradients and take the optimizer's step."""
        if self.clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


def check_amp(amp: str) -> None:
    """Raises a TrainingError if this rank's device does not compute in `amp`."""
    if amp == "fp16" and device().type != "cuda":
        raise TrainingError("amp fp16 needs a GPU, and this machine has none: use bf16 or off")
    if amp == "bf16" and device().type == "cuda" and not torch.cuda.is_bf16_supported():
        name = torch.cuda.get_device_name()
        raise TrainingError(f"amp bf16 is not supported by this GPU ({name}): use fp16 or off")
