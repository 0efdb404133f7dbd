"""What a training run measured, put together from all ranks."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import NamedTuple

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)


class Step(NamedTuple):
    """One step of one rank.

    `loss` is a scalar, the mean over the rank's batch before the update. `sync_seconds` is how long
    the rank waited for the averaged gradients when its own were complete.
    """

    loss: torch.Tensor
    seconds: float
    sync_seconds: float


@dataclass(frozen=True)
class Result:
    """What a training run gave; the same on every rank.

    Attributes:
        losses: Of each step, the mean loss over the joined batch before the update.
        seconds: Training time, data loading and checkpoints included, evaluation not.
        samples_per_second: Of all ranks together.
        sync_share: The part of the steps' time (0 to 1), mean over the ranks, from when a rank's
            own gradients were complete until they were averaged; waiting for slower ranks is in
            it, data loading is not. SimpleDDP sends everything in that time. The DDPs send most of
            it during backward: their share is what backward could not hide, and not what sending
            costs a backward that it shares the machine with.
        evaluation_loss: Mean loss over the test pairs, after training.
        accuracy: The part of the test pairs (0 to 1) that was classified correctly.
        world_size: How many ranks trained.
        first_step: How many steps had been taken before, by the training that this one resumed.
    """

    losses: list[float]
    seconds: float
    samples_per_second: float
    sync_share: float
    evaluation_loss: float
    accuracy: float
    world_size: int
    first_step: int = 0


def summarise(
    history: Sequence[Step],
    seconds: float,
    batch_size: int,
    evaluation_loss: float,
    accuracy: float,
    first_step: int = 0,
) -> Result:
    """This rank's steps and training time, averaged with those of the other ranks."""
    losses = torch.stack([step.loss for step in history]).double()
    step_seconds = sum(step.seconds for step in history)
    sync_seconds = sum(step.sync_seconds for step in history)
    means = torch.cat([losses, losses.new_tensor([seconds, step_seconds, sync_seconds])])
    dist.all_reduce(means)
    means /= dist.get_world_size()
    *mean_losses, seconds, step_seconds, sync_seconds = means.tolist()
    return Result(
        losses=mean_losses,
        seconds=seconds,
        samples_per_second=len(history) * batch_size * dist.get_world_size() / seconds,
        sync_share=sync_seconds / step_seconds,
        evaluation_loss=evaluation_loss,
        accuracy=accuracy,
        world_size=dist.get_world_size(),
        first_step=first_step,
    )


def log_summary(result: Result) -> None:
    """Three lines: loss, speed, evaluation."""
    steps = len(result.losses)
    tenth = max(1, steps // 10)
    first, last = mean(result.losses[:tenth]), mean(result.losses[-tenth:])
    logger.info("loss: %.3f → %.3f (means of the first and last %d steps)", first, last, tenth)
    logger.info(
        "speed: %d steps on %d %s in %.1f s, %.1f samples per second, "
        "%.1f %% of the step time in synchronisation",
        *(steps, result.world_size, "rank" if result.world_size == 1 else "ranks"),
        *(result.seconds, result.samples_per_second, 100 * result.sync_share),
    )
    logger.info("evaluation: loss %.3f, accuracy %.3f", result.evaluation_loss, result.accuracy)
