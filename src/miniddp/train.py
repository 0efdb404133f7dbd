"""Fine-tune a classifier of sentence pairs, on one rank or on many."""

import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.elastic.multiprocessing.errors import record
from torch.profiler import profile, schedule, tensorboard_trace_handler
from torch.utils.data import DataLoader
from tqdm import tqdm

from miniddp.accumulation import global_mean
from miniddp.checkpoint import latest, load, save
from miniddp.data import (
    DataError,
    batches,
    build_loader,
    collate,
    load_data,
    step_count,
    to_device,
)
from miniddp.job import run, say_once, start
from miniddp.model import load_model
from miniddp.options import (
    Options,
    OptionsError,
    check_outputs,
    flag,
    parse_options,
)
from miniddp.process import check_group, device, get, set_seed
from miniddp.sampler import shard
from miniddp.state_file import CheckpointError
from miniddp.together import from_rank_0, succeed_together
from miniddp.training_step import (
    WRAPPERS,
    build_optimizer,
    check_amp,
    settle,
    train_step,
)

LOOK_EVERY = 20  # steps: to look at a loss, Python waits for the device
KEPT = 2  # checkpoints: one of them can be damaged
# When resumed; the other options have shaped the steps so far.
MAY_CHANGE = {"data_dir", "epochs", "steps", "checkpoint", "checkpoint_every"}
MAY_CHANGE |= {"resume", "profile", "tensorboard"}
logger = logging.getLogger(__name__)


class TrainingError(ValueError):
    """A training that cannot start, and why."""


@dataclass(frozen=True)
class Result:
    """What a training gave; the same on every rank.

    `losses` has the joined batch's mean loss in each step, before its update;
    `seconds` are those of the steps and checkpoints, not of the evaluation;
    `samples_per_second` are of all ranks. `evaluation_loss` and `accuracy` (0
    to 1) are over the test pairs. `first_step` steps had been taken before.
    """

    losses: list[float]
    seconds: float
    samples_per_second: float
    evaluation_loss: float
    accuracy: float
    world_size: int
    first_step: int = 0


def train(options: Options) -> Result:
    """Train and evaluate as one rank of the default process group.

    Raises, on every rank: `DataError` for data that cannot be used or is too
    little, `TrainingError` for what this machine cannot do, `CheckpointError`
    for a checkpoint that cannot be resumed or saved.
    """
    check_group()
    succeed_together(partial(check_amp, options.amp), TrainingError)
    from_rank_0(partial(check_outputs, options), TrainingError)
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
    trainer.close(result)
    log_summary(result)
    return result


class Trainer:
    """A rank's data, model and optimizer, and the steps it takes with them."""

    def __init__(self, options: Options) -> None:
        self.options = options
        set_seed(options.seed)
        pairs, test_pairs, tokenizer, digest = load_data(options)
        self.loader = build_loader(pairs, tokenizer, options)
        self.test = test_pairs, tokenizer
        self.module = load_model(options.model, options.pretrained).to(device())
        self.model = WRAPPERS[options.ddp](self.module)
        self.optimizer, self.scheduler = build_optimizer(self.module, options)
        self.scaler = GradScaler(device().type, enabled=options.amp == "fp16")
        set_seed(options.seed, rank_offset=get("rank"))  # for dropout masks
        self.state = {"model": self.module, "optimizer": self.optimizer}
        self.state |= {"scheduler": self.scheduler, "scaler": self.scaler}
        self.state |= {"sampler": self.loader.sampler}
        chosen = {**asdict(options), "data": digest}.items()
        self.identity = {k: v for k, v in chosen if k not in MAY_CHANGE}
        self.first_step = 0
        self.curves: Any = None
        if options.tensorboard and get("rank") == 0:
            from torch.utils.tensorboard import SummaryWriter

            self.curves = SummaryWriter(options.tensorboard)

    def resume(self) -> None:
        """Go on from a checkpoint, if the options ask for one."""
        path = find_checkpoint(self.options)
        if path is None:
            return
        settle(self.model, self.optimizer, next(iter(self.loader)))
        self.first_step, before = load(path, self.state)
        for name, value in self.identity.items():
            if value != (was := (before or {}).get(name)):
                other = f"{flag(name)} {was}, not {value}"
                other = "other data" if name == "data" else other
                raise CheckpointError(f"{path} was saved with {other}")
        logger.info("resumed after step %d from %s", self.first_step, path)

    def fit(self) -> list[float]:
        """Train to the last step; the joined batch's mean loss in each."""
        options, first = self.options, self.first_step
        last = step_count(self.loader, options)
        if first > last:
            raise TrainingError(f"{first} steps are taken, of {last}")
        if options.profile and last - first < 9:
            logger.warning("--profile: fewer than 9 steps leave no trace")
        todo = batches(self.loader, options)
        every = options.checkpoint_every or last
        parts = self.model, self.optimizer
        more: Any = {"amp": options.amp, "clip": options.clip}
        more["scaler"] = self.scaler
        losses: list[float] = []
        recent: list[Tensor] = []
        self.model.train()
        hidden = None if get("rank") == 0 else True
        bar = tqdm(initial=first, total=last, unit="step", disable=hidden)
        with bar, tracing(options.profile) as trace:
            for step in range(first + 1, last + 1):
                rate = float(self.scheduler.get_last_lr()[0])
                self.write("train/learning_rate", rate, step)
                recent.append(train_step(*parts, next(todo), **more))
                self.scheduler.step()
                if step % LOOK_EVERY == 0 or step == last:
                    for mean in global_mean(torch.stack(recent), 1).tolist():
                        losses.append(mean)
                        self.write("train/loss", mean, first + len(losses))
                    bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
                    recent.clear()
                if options.checkpoint and (step % every == 0 or step == last):
                    folder, extra = options.checkpoint, self.identity
                    save(folder, step, self.state, extra=extra, keep=KEPT)
                if trace:
                    trace.step()
                bar.update()
        return losses

    def write(self, name: str, value: float, step: int) -> None:
        """A point of a curve, on rank 0, where TensorBoard was asked for."""
        if self.curves:
            self.curves.add_scalar(name, value, step)

    def close(self, result: Result) -> None:
        """The last points of the curves, and the end of their file."""
        last = self.first_step + len(result.losses)
        self.write("evaluation/loss", result.evaluation_loss, last)
        self.write("evaluation/accuracy", result.accuracy, last)
        if self.curves:
            self.curves.close()


@torch.no_grad()
def evaluate(
    model: nn.Module, data: Any, tokenizer: Any, batch_size: int
) -> tuple[float, float]:
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

    Raises `CheckpointError` if there is none, or only damaged ones, and
    `TrainingError` rather than mix two trainings in a folder.
    """
    folder, wanted = options.checkpoint, options.resume
    own = latest(folder) if folder and wanted in (None, "auto") else None
    if wanted == "auto":
        if own is None:
            logger.info("no checkpoint yet: training begins anew")
        return own
    if own is not None:
        raise TrainingError(
            f"{folder} has checkpoints of another training: go on with "
            "--resume auto, or choose another folder"
        )
    if wanted is None or not from_rank_0(Path(wanted).is_dir, CheckpointError):
        return Path(wanted) if wanted else None
    path = latest(wanted)
    if path is None:
        raise CheckpointError(f"cannot resume: no checkpoint in {wanted}")
    return path


def tracing(folder: str | None) -> AbstractContextManager[profile | None]:
    """A profiler of rank 0's steps 8 to 12, counted from 0, into `folder`."""
    if folder is None or get("rank") != 0:
        return nullcontext()
    phases = schedule(skip_first=5, wait=1, warmup=2, active=5, repeat=1)
    write = tensorboard_trace_handler(folder, "rank0", use_gzip=True)
    return profile(schedule=phases, on_trace_ready=write)


def log_summary(result: Result) -> None:
    """Loss and speed, if there was a step, and the evaluation."""
    steps, ranks = len(result.losses), result.world_size
    if steps:
        tenth = max(1, steps // 10)
        first, last = result.losses[:tenth], result.losses[-tenth:]
        means = sum(first) / tenth, sum(last) / tenth
        text = "loss: %.3f → %.3f (means of the first and last %d steps)"
        logger.info(text, *means, tenth)
        logger.info(
            "speed: %d steps on %d %s in %.1f s, %.1f samples per second",
            *(steps, ranks, "rank" if ranks == 1 else "ranks"),
            *(result.seconds, result.samples_per_second),
        )
    measured = result.evaluation_loss, result.accuracy
    logger.info("evaluation: loss %.3f, accuracy %.3f", *measured)


@record
def main(arguments: Sequence[str] | None = None) -> int:
    """Train with the options of the command line; returns the exit code.

    What the user can mend is one line and code 1, or 2 for the options.
    """
    start()
    try:
        parse = partial(parse_options, arguments)
        train(succeed_together(parse, OptionsError))
    except (OptionsError, DataError, TrainingError, CheckpointError) as error:
        say_once(f"miniddp.train: error: {error}")
        return 2 if isinstance(error, OptionsError) else 1
    return 0


if __name__ == "__main__":
    run(main)
