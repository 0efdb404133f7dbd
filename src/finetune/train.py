"""Fine-tune a classifier of sentence pairs, on one rank or on many."""

import logging
import math
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

from finetune import checkpoint, data, job, training_step
from finetune.data import collate, load_data, to_device
from finetune.model import load_model
from finetune.options import (
    Options,
    OptionsError,
    Unchanged,
    check_outputs,
    flag,
    parse_options,
)
from finetune.state_file import CheckpointError
from finetune.watch import Pace, watching
from miniddp.accumulation import global_mean
from miniddp.process import check_group, device, get, set_seed
from miniddp.sampler import shard

LOOK_EVERY = 20  # steps: to look at a loss, Python waits for the device
STOPPED = 75  # exit code: EX_TEMPFAIL of sysexits.h, "try again later"
logger = logging.getLogger(__name__)


class TrainingError(ValueError):
    """A training that cannot start or go on, and why."""


ERRORS = OptionsError, data.DataError, TrainingError, CheckpointError


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
    chosen = {flag(name): value for name, value in asdict(options).items()}
    del chosen["--data-dir"]  # the data are compared when they are there
    job.check_alike({**chosen, **job.versions()}, TrainingError)
    check_amp = partial(training_step.check_amp, options.amp)
    for check in (check_amp, partial(check_outputs, options)):
        job.succeed_together(check, TrainingError)
    folder = options.checkpoint
    with checkpoint.locked(folder) if folder else nullcontext():
        trainer = Trainer(options)
        trainer.resume()
        start = time.perf_counter()
        losses = trainer.fit()
    took = torch.tensor(time.perf_counter() - start, device=device())
    seconds = global_mean(took, 1).item()
    speed = len(losses) * options.batch_size * get("ws") / seconds
    measured = evaluate(trainer.module, *trainer.test, options.batch_size)
    first = trainer.first_step
    result = Result(losses, seconds, speed, *measured, get("ws"), first)
    log_summary(result)
    return result


class Trainer:
    """A rank's data, model and optimizer, and the steps it takes with them."""

    def __init__(self, options: Options) -> None:
        self.options = options
        set_seed(options.seed)
        pairs, test_pairs, tokenizer, digest = load_data(options)
        self.loader = data.build_loader(pairs, tokenizer, options)
        self.test = test_pairs, tokenizer
        self.module = load_model(options.model, options.pretrained).to(device())
        self.model = training_step.WRAPPERS[options.ddp](self.module)
        trained = training_step.build_optimizer(self.module, options)
        self.optimizer, self.scheduler = trained
        self.scaler = GradScaler(device().type, enabled=options.amp == "fp16")
        set_seed(options.seed, rank_offset=get("rank"))  # for dropout masks
        self.state: dict[str, Any] = {
            "options": Unchanged(options, digest),
            "model": self.module,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "place": data.Place(self.loader.sampler, options.batch_size),
        }
        self.first_step = 0
        self.saved: Path | None = None

    def resume(self) -> None:
        """Go on from a checkpoint, if the options ask for one."""
        path = self.saved = find_checkpoint(self.options)
        if path is None:
            return
        parts = self.model, self.optimizer
        training_step.rebuild_buckets(*parts, next(iter(self.loader)))
        elastic, keep = self.options.elastic, self.options.keep
        self.first_step = checkpoint.load(path, self.state, elastic)
        logger.info("resumed after step %d from %s", self.first_step, path)
        if self.options.resume == "auto" and get("rank") == 0:
            checkpoint.remove_old(path, keep)  # a save may have been killed

    def fit(self) -> list[float]:
        """Train to the last step; the joined batch's mean loss in each."""
        options, first = self.options, self.first_step
        last = first + data.steps_left(self.loader, options)
        last = min(last, options.steps or last)
        if first > last:
            raise TrainingError(f"{first} steps are taken, of {last}")
        if options.profile and last - first < 9:
            logger.warning("--profile: fewer than 9 steps leave no trace")
        todo = data.batches(self.loader, options)
        every = options.checkpoint_every or last
        parts = self.model, self.optimizer
        more: Any = {"amp": options.amp, "clip": options.clip}
        more["scaler"] = self.scaler
        losses: list[float] = []
        recent: list[Tensor] = []
        pace = Pace(self.module, LOOK_EVERY)
        self.model.train()
        hidden = None if get("rank") == 0 else True
        bar = tqdm(initial=first, total=last, unit="step", disable=hidden)
        tracing = training_step.tracing(options.profile)
        with bar, tracing as trace, job.stop_requests() as asked:
            for step in range(first + 1, last + 1):
                with pace:
                    loss = training_step.train_step(*parts, next(todo), **more)
                recent.append(loss)
                self.scheduler.step()
                due = step % every == 0 or step == last
                if due or step % LOOK_EVERY == 0:
                    means, stop = self.look(step, recent, bool(asked))
                    losses += means
                    bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
                    recent.clear()
                    if options.checkpoint and (due or stop):
                        where = options.checkpoint, step, self.state
                        self.saved = checkpoint.save(*where, options.keep)
                    if stop:
                        raise job.Stopped(step, self.saved)
                if trace:
                    trace.step()
                bar.update()
        return losses

    def look(self, step: int, recent: list[Tensor], asked: bool) -> tuple[list[float], bool]:
        """The recent mean losses, and whether any rank was `asked` to stop.

        `TrainingError` on every rank if a loss or a weight is not finite.
        """
        norm = nn.utils.get_total_norm(self.module.parameters())
        request = torch.tensor(float(asked), device=device())
        mine = torch.stack([*recent, norm, request])
        *means, norm_of_all, requests = global_mean(mine, 1).tolist()
        finite = [math.isfinite(mean) for mean in (*means, norm_of_all)]
        if not all(finite):
            at = finite.index(False)
            where = [bool(mine[at].isfinite())] * get("ws")
            dist.all_gather_object(where, where[0])
            ranks = ", ".join(str(r) for r, fine in enumerate(where) if not fine)
            number = min(step, step - len(recent) + 1 + at)
            what = "the loss of" if at < len(recent) else "a weight after"
            raise TrainingError(
                f"{what} step {number} is not finite on rank {ranks}; "
                f"the last good checkpoint: {self.saved}"
            )
        return means, requests > 0


@torch.no_grad()
def evaluate(model: nn.Module, data: Any, tokenizer: Any, batch_size: int) -> tuple[float, float]:
    """Mean loss and accuracy over all of `data`, each pair counted once.

    The shards may differ in length: the ranks add up sums and counts, never
    means. Every part of the model is left in the mode that it was in.
    """
    sampler = shard(len(data), get("ws"), get("rank"))
    pad = partial(collate, tokenizer=tokenizer)
    loader = DataLoader(data, batch_size, sampler=sampler, collate_fn=pad)
    sums = torch.zeros(2, dtype=torch.float64, device=device())
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    for batch in map(to_device, loader):
        output, labels = model(**batch), batch["labels"]
        correct = (output.logits.argmax(dim=-1) == labels).sum()
        sums += torch.stack([output.loss * len(labels), correct])
    for part, mode in modes:
        part.training = mode
    loss, accuracy = global_mean(sums, len(sampler)).tolist()
    return loss, accuracy


def find_checkpoint(options: Options) -> Path | None:
    """The checkpoint to resume; None to begin anew.

    Raises `CheckpointError` if there are only damaged ones, `TrainingError`
    rather than mix two trainings in a folder.
    """
    folder = options.checkpoint
    own = checkpoint.latest(folder) if folder else None
    if options.resume == "auto":
        if own is None:
            logger.info("no checkpoint yet: training begins anew")
        return own
    if own is not None:
        raise TrainingError(
            f"{folder} has checkpoints of another training: go on with "
            "--resume auto, or choose another folder"
        )
    return Path(options.resume) if options.resume else None


def log_summary(result: Result) -> None:
    """Loss and speed, if there was a step, and the evaluation."""
    if steps := len(result.losses):
        tenth = max(1, steps // 10)
        parts = result.losses[:tenth], result.losses[-tenth:]
        text = "loss: %.3f → %.3f (means of the first and last %s)"
        of = "step" if tenth == 1 else f"{tenth} steps"
        logger.info(text, *(sum(part) / tenth for part in parts), of)
        text = "speed: %d steps on %d %s in %.1f s, %.1f samples per second"
        ranks = result.world_size, "rank" if result.world_size == 1 else "ranks"
        logger.info(text, steps, *ranks, result.seconds, result.samples_per_second)
    measured = result.evaluation_loss, result.accuracy
    logger.info("evaluation: loss %.3f, accuracy %.3f", *measured)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train with the options of the command line; returns the exit code.

    What the user can mend is one line and 1, or 2 for options; a signal: 75.
    """
    parse = partial(parse_options, arguments)
    timeout = Options.timeout
    with suppress(OptionsError):  # every rank hears of it below
        timeout = parse().timeout
    job.start(timeout)
    if line := job.said_before():
        job.say_once(line)
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
        job.say_once(f"finetune: error: {error}")
        return 2 if isinstance(error, OptionsError) else 1
    return 0
