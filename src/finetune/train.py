"""Fine-tune a classifier of sentence pairs, on one rank or on many."""

import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils.data import DataLoader
from tqdm import tqdm

from finetune import checkpoint, data, job, last_words, training_step
from finetune.data import collate, load_data, to_device
from finetune.model import load_model
from finetune.options import (
    Options,
    OptionsError,
    ShapingOptions,
    check_outputs,
    flag,
    parse_options,
)
from finetune.state_file import CheckpointError
from finetune.watch import Pace, watching
from miniddp.accumulation import global_mean
from miniddp.process import check_group, device, set_seed
from miniddp.sampler import shard

EXCHANGE_EVERY = 20  # steps: to see a loss, Python waits for the device
STEPS_OF_A_TRACE = 9  # before they are taken, there is none
STOPPED = 75  # exit code: EX_TEMPFAIL of sysexits.h, "try again later"
logger = logging.getLogger(__name__)


class TrainingError(ValueError):
    """A training that cannot start or go on, and why."""


ERRORS = (OptionsError, data.DataError, TrainingError, CheckpointError)


@dataclass(frozen=True)
class Result:
    """What a training gave; the same on every rank.

    `losses`: each step's mean loss over the joined batch, before its update;
    `seconds`: of steps and checkpoints; `samples_per_second`: of all ranks;
    `evaluation_loss`, `accuracy` (0 to 1): over the test pairs.
    """

    losses: list[float]
    seconds: float
    samples_per_second: float
    evaluation_loss: float
    accuracy: float
    world_size: int
    first_step: int = 0  # steps that were taken before


def train(options: Options) -> Result:
    """Train and evaluate as one rank of the default process group.

    Raises, on every rank: `DataError` for data that cannot be used or is too
    little; `TrainingError` for what this machine cannot do, for ranks that
    differ, for a loss that is not finite; `CheckpointError` for a checkpoint
    that cannot be resumed or saved; `Stopped` after SIGTERM or SIGINT.
    """
    check_group()
    check_ranks(options)
    folder = options.checkpoint
    with checkpoint.locked(folder) if folder else nullcontext():
        trainer = Trainer(options)
        trainer.resume()
        start = time.perf_counter()
        losses = trainer.take_steps()
    took = torch.tensor(time.perf_counter() - start, device=device())
    seconds = global_mean(took, 1).item()
    world_size = dist.get_world_size()
    samples = len(losses) * options.batch_size * world_size
    evaluation_loss, accuracy = evaluate(
        trainer.module,
        trainer.test_pairs,
        trainer.tokenizer,
        options.batch_size,
    )
    result = Result(
        losses,
        seconds,
        samples / seconds,
        evaluation_loss,
        accuracy,
        world_size,
        trainer.first_step,
    )
    log_summary(result)
    return result


def check_ranks(options: Options) -> None:
    """Raise on every rank if one has other options or code, or cannot follow."""
    chosen = {flag(name): value for name, value in asdict(options).items()}
    del chosen["--data-dir"]  # the data are compared when they are there
    job.check_alike({**chosen, **job.versions()}, TrainingError)
    can_compute = partial(training_step.check_amp, options.amp)
    job.succeed_together(can_compute, TrainingError)
    can_write = partial(check_outputs, options)
    job.succeed_together(can_write, TrainingError)


class Trainer:
    """A rank's data, model and optimizer, and the steps it takes with them."""

    def __init__(self, options: Options) -> None:
        self.options = options
        set_seed(options.seed)
        pairs, self.test_pairs, self.tokenizer, digest = load_data(options)
        self.loader = data.build_loader(pairs, self.tokenizer, options)
        self.batches = data.Batches(self.loader, options)
        self.module = load_model(options.model, options.pretrained).to(device())
        self.model = training_step.WRAPPERS[options.ddp](self.module)
        self.optimizer, self.scheduler = training_step.build_optimizer(
            self.module, options
        )
        self.scaler = GradScaler(device().type, enabled=options.amp == "fp16")
        set_seed(options.seed, rank_offset=1 + dist.get_rank())  # for dropout masks
        self.state: dict[str, Any] = {
            "options": ShapingOptions(options, digest),
            "model": self.module,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "batches": self.batches,
        }
        self.first_step = 0
        self.saved: Path | None = None

    def resume(self) -> None:
        """Go on from a checkpoint, if the options ask for one."""
        found = find_checkpoint(self.options)
        if found is None:
            return
        batch = next(iter(self.loader))
        training_step.rebuild_buckets(self.model, self.optimizer, batch)
        self.saved = found.path
        self.first_step = checkpoint.load(found, self.state, self.options.elastic)
        logger.info("resumed after step %d from %s", self.first_step, found.path)
        if self.options.resume == "auto" and dist.get_rank() == 0:
            # The save of this checkpoint may have been killed before it did.
            checkpoint.remove_old(found.path, self.options.keep)

    def take_steps(self) -> list[float]:
        """Train to the last step; the joined batch's mean loss in each."""
        options = self.options
        last = self.last_step()
        save_every = options.checkpoint_every or last
        losses: list[float] = []
        recent: list[Tensor] = []
        pace = Pace(self.module, EXCHANGE_EVERY)
        self.model.train()
        bar = tqdm(
            initial=self.first_step,
            total=last,
            unit="step",
            disable=None if dist.get_rank() == 0 else True,  # None: no terminal
        )
        tracing = training_step.tracing(options.profile)
        with bar, tracing as trace, job.stop_requests() as requests:
            for step in range(self.first_step + 1, last + 1):
                with pace:
                    loss = training_step.train_step(
                        self.model,
                        self.optimizer,
                        next(self.batches),
                        amp=options.amp,
                        scaler=self.scaler,
                        clip=options.clip,
                    )
                self.scheduler.step()
                recent.append(loss)
                save_is_due = step % save_every == 0 or step == last
                if save_is_due or step % EXCHANGE_EVERY == 0:
                    means, stop = self.exchange(step, recent, bool(requests))
                    recent.clear()
                    losses += means
                    bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
                    if save_is_due or stop:
                        self.save(step)
                    if stop:
                        raise job.Stopped(step, self.saved)
                if trace:
                    trace.step()
                bar.update()
        return losses

    def last_step(self) -> int:
        """`TrainingError` if it is behind this training."""
        last = self.first_step + self.batches.steps_left()
        if self.options.steps is not None:
            last = min(last, self.options.steps)
        if last < self.first_step:
            raise TrainingError(f"{self.first_step} steps are taken, of {last}")
        if self.options.profile and last - self.first_step < STEPS_OF_A_TRACE:
            text = "--profile: fewer than %d steps leave no trace"
            logger.warning(text, STEPS_OF_A_TRACE)
        return last

    def save(self, step: int) -> None:
        """A checkpoint, if the options name a folder for it."""
        folder = self.options.checkpoint
        if folder is not None:
            keep = self.options.keep
            self.saved = checkpoint.save(folder, step, self.state, keep)

    def exchange(
        self, step: int, recent: list[Tensor], asked_to_stop: bool
    ) -> tuple[list[float], bool]:
        """The recent mean losses, and whether any rank was asked to stop.

        `TrainingError` on every rank if a loss or a weight is not finite.
        """
        norm = nn.utils.get_total_norm(self.module.parameters())
        request = torch.tensor(float(asked_to_stop), device=device())
        values = torch.stack([*recent, norm, request])
        by_rank = values.new_zeros(dist.get_world_size(), len(values))
        by_rank[dist.get_rank()] = values
        dist.all_reduce(by_rank)
        by_rank = by_rank.double().cpu()
        bad = ~by_rank.isfinite()
        if bad.any():
            index = int(bad.any(dim=0).nonzero()[0])
            ranks = bad[:, index].nonzero().flatten().tolist()
            what = f"a weight after step {step}"
            if index < len(recent):
                what = f"the loss of step {step - len(recent) + 1 + index}"
            raise TrainingError(
                f"{what} is not finite on rank {', '.join(map(str, ranks))}; "
                f"the last good checkpoint: {self.saved}"
            )
        *means, _, requests = by_rank.mean(dim=0).tolist()
        return means, requests > 0


@torch.no_grad()
def evaluate(
    model: nn.Module, pairs: Any, tokenizer: Any, batch_size: int
) -> tuple[float, float]:
    """Mean loss and accuracy over all `pairs`, each of them counted once.

    The shards may differ in length: the ranks add up sums and counts, never
    means. Every part of the model is left in the mode that it was in.
    """
    sampler = shard(len(pairs), dist.get_world_size(), dist.get_rank())
    pad = partial(collate, tokenizer=tokenizer)
    loader = DataLoader(pairs, batch_size, sampler=sampler, collate_fn=pad)
    sums = torch.zeros(2, dtype=torch.float64, device=device())
    was_training = {part: part.training for part in model.modules()}
    model.eval()
    for batch in map(to_device, loader):
        output = model(**batch)
        labels = batch["labels"]
        correct = (output.logits.argmax(dim=-1) == labels).sum()
        sums += torch.stack([output.loss * len(labels), correct])
    for part, training in was_training.items():
        part.training = training
    loss, accuracy = global_mean(sums, len(sampler)).tolist()
    return loss, accuracy


def find_checkpoint(options: Options) -> checkpoint.Checkpoint | None:
    """The checkpoint to resume; None to begin anew.

    Raises `CheckpointError` if there are only damaged ones, `TrainingError`
    rather than mix two trainings in a folder.
    """
    folder = options.checkpoint
    if options.resume == "auto" and folder:
        found = checkpoint.latest(folder)
        if found is None:
            logger.info("no checkpoint yet: training begins anew")
        return found
    if folder and checkpoint.names_newest_first(folder):
        raise TrainingError(
            f"{folder} has checkpoints of another training: go on with "
            "--resume auto, or choose another folder"
        )
    return checkpoint.read(options.resume) if options.resume else None


def log_summary(result: Result) -> None:
    """Loss and speed, if there was a step, and the evaluation."""
    if steps := len(result.losses):
        tenth = max(1, steps // 10)
        first = sum(result.losses[:tenth]) / tenth
        last = sum(result.losses[-tenth:]) / tenth
        of = "step" if tenth == 1 else f"{tenth} steps"
        text = "loss: %.3f → %.3f (means of the first and last %s)"
        logger.info(text, first, last, of)
        logger.info(
            "speed: %d steps on %d %s in %.1f s, %.1f samples per second",
            steps,
            result.world_size,
            "rank" if result.world_size == 1 else "ranks",
            result.seconds,
            result.samples_per_second,
        )
    text = "evaluation: loss %.3f, accuracy %.3f"
    logger.info(text, result.evaluation_loss, result.accuracy)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train with the options of the command line; returns the exit code.

    What the user can mend is one line and 1, or 2 for options; a signal: 75.
    """
    parse = partial(parse_options, arguments)
    at_start = Options()
    with suppress(OptionsError):  # every rank hears of it below
        at_start = parse()
    try:
        job.start(at_start.timeout, at_start.backend)
    except ValueError as error:  # of every rank, without a group
        last_words.say(f"finetune: error: {error}")
        return 2
    if line := last_words.error_before_restart():
        last_words.say_once(line)
        return 1
    try:
        options = job.succeed_together(parse, OptionsError)
        with watching(options.timeout):
            train(options)
    except job.Stopped as stop:
        text = "stopped by a signal after step %d; the last checkpoint: %s"
        logger.info(text, *stop.args)
        return STOPPED
    except ERRORS as error:
        last_words.say_once(f"finetune: error: {error}")
        return 2 if isinstance(error, OptionsError) else 1
    return 0
