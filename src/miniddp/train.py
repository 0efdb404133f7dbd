"""Fine-tune a classifier of sentence pairs, on one process or data parallel on many.

    python -m miniddp.train --model tiny
    torchrun --nproc_per_node=2 -m miniddp.train --data-dir data/mrpc --model tiny
    torchrun --nproc_per_node=2 -m miniddp.train --checkpoint DIR --resume auto

The first two train on the same joined batches when ``--batch-size`` times the number of ranks is
the same. The last one goes on where it was interrupted, bit for bit, if ``--checkpoint-every`` says
how often to save.
"""

import functools
import itertools
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from instruments.clock import clock
from instruments.profiling import Profiler
from miniddp.accumulation import global_mean
from miniddp.batches import Batch, batches, build_data, build_loader, step_count, to_device
from miniddp.command_line import parse_options
from miniddp.data import DataError, collate
from miniddp.model import load_model
from miniddp.naive import SimpleDDP
from miniddp.options import Options, TrainingError
from miniddp.process import (
    check_group,
    destroy_process_group,
    device,
    get,
    init_process_group,
    set_seed,
)
from miniddp.report import Result, Step, log_summary, summarise
from miniddp.resume import Checkpoints, check_folders
from miniddp.sampler import EvaluationSampler
from miniddp.scalars import Scalars
from miniddp.schedule import build_optimizer
from miniddp.state_file import CheckpointError
from miniddp.training_step import TrainingStep, check_amp

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["Options", "Result", "evaluate", "main", "train", "train_step"]
logger = logging.getLogger(__name__)


def train(options: Options) -> Result:
    """Trains and evaluates as one rank of the default process group, which must be running.

    Raises, on every rank:
        DataError: the data cannot be used, or the training pairs do not fill one joined batch.
        TrainingError: this machine cannot do what the options ask for, or a folder cannot be used.
        CheckpointError: a checkpoint cannot be resumed or saved.
    """
    check_group()
    check_amp(options.amp)
    check_folders(options)
    set_seed(options.seed)
    train_data, test_data, tokenizer, digest = build_data(options)
    module = load_model(options.model, options.pretrained).to(device())
    optimizer, scheduler = build_optimizer(module, options)
    step = TrainingStep(module, optimizer, options.ddp, options.amp, options.clip)
    loader = build_loader(train_data, tokenizer, options)
    state = {"model": module, "optimizer": optimizer, "scheduler": scheduler}
    state |= {"scaler": step.scaler, "sampler": loader.sampler}
    checkpoints = Checkpoints(options, state, digest)
    set_seed(options.seed, rank_offset=get("rank"))  # the ranks drop out other activations
    first_step = 0
    path = checkpoints.find()
    if path is not None:
        step.settle(next(iter(loader)))
        first_step = checkpoints.restore(path)

    with Scalars(options.tensorboard) as scalars:
        start = clock()
        history = fit(step, scheduler, loader, options, checkpoints, scalars, first_step)
        seconds = clock() - start
        loss, accuracy = evaluate(module, test_data, tokenizer, options.batch_size)
        scalars.write(
            first_step + len(history), {"evaluation/loss": loss, "evaluation/accuracy": accuracy}
        )
    result = summarise(history, seconds, options.batch_size, loss, accuracy, first_step)
    log_summary(result)
    return result


def fit(
    step: TrainingStep,
    scheduler: LambdaLR,
    loader: DataLoader[Any],
    options: Options,
    checkpoints: Checkpoints,
    scalars: Scalars,
    first_step: int,
) -> list[Step]:
    """Trains from ``first_step`` to the last one that was asked for; returns every step."""
    total = step_count(loader, options)
    if first_step >= total:
        raise TrainingError(
            f"nothing is left to train: the checkpoint is of step {first_step} of {total}"
        )
    history: list[Step] = []
    step.model.train()
    with progress_bar(first_step, total) as bar, profiler(options.profile) as profile:
        todo = itertools.islice(batches(loader, options), total - first_step)
        for number, micro_batches in enumerate(todo, first_step + 1):
            if options.plain:
                history.append(train_step(step.model, step.optimizer, *micro_batches))
            else:
                history.append(step(micro_batches))
            scalars.write_step(number, history[-1], float(scheduler.get_last_lr()[0]))
            scheduler.step()
            checkpoints.after(number, is_last=number == total)
            if profile is not None:
                profile.step()
            bar.set_postfix(loss=f"{history[-1].loss.item():.3f}", refresh=False)
            bar.update()
    return history


def train_step(model: SimpleDDP, optimizer: torch.optim.Optimizer, batch: Batch) -> Step:
    """Forward, backward, synchronise, update."""
    start = clock()
    loss = model(**to_device(batch)).loss
    loss.backward()
    backward_done = clock()
    model.sync_gradients()
    sync_done = clock()
    optimizer.step()
    optimizer.zero_grad()
    return Step(loss.detach(), clock() - start, sync_done - backward_done)


def progress_bar(first_step: int, total: int) -> Any:
    """Steps, rate and time left, on rank 0's terminal; nothing where the output is a file."""
    from tqdm import tqdm

    hidden = None if get("rank") == 0 else True
    return tqdm(initial=first_step, total=total, unit="step", disable=hidden)


def profiler(folder: str | None) -> AbstractContextManager[Profiler | None]:
    """A profiler that writes into ``folder``, or None."""
    return nullcontext() if folder is None else Profiler(folder)


@torch.no_grad()
def evaluate(model: Any, data: "Dataset", tokenizer: Any, batch_size: int) -> tuple[float, float]:
    """Mean loss and accuracy over all of ``data``, each pair counted once.

    The shards may differ in length: the ranks add up sums and counts, never means.
    """
    sampler = EvaluationSampler(data)
    collate_batch = functools.partial(collate, tokenizer=tokenizer)
    sums = torch.zeros(2, dtype=torch.float64, device=device())
    model.eval()
    for batch in DataLoader(data, batch_size, sampler=sampler, collate_fn=collate_batch):
        batch = to_device(batch)
        output, labels = model(**batch), batch["labels"]
        correct = (output.logits.argmax(dim=-1) == labels).sum()
        sums += torch.stack([output.loss * len(labels), correct])
    loss, accuracy = global_mean(sums, len(sampler)).tolist()
    return loss, accuracy


def start() -> None:
    """Starts the process group that torchrun describes, or a group of one; only rank 0 logs."""
    rank = int(os.environ.get("RANK", 0))
    if rank != 0:
        os.environ.update(TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1")
    logging.basicConfig(level=logging.ERROR if rank else logging.INFO, format="%(message)s")
    if "RANK" in os.environ:
        init_process_group()
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        init_process_group(store=store, rank=0, world_size=1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains with the options of the command line; bad input ends in one line and exit code 1."""
    options = parse_options(Options, "miniddp.train", __doc__, arguments)
    start()
    try:
        train(options)
    except (DataError, TrainingError, CheckpointError) as error:
        sys.stderr.write(f"miniddp.train: error: {error}\n")  # in one piece: all ranks write there
        sys.exit(1)
    finally:
        destroy_process_group()


if __name__ == "__main__":
    main()
    # Everything is saved. Python's own end would now and then abort in a thread of a C++ library
    # that asks for the interpreter while it goes away, and torchrun would report a failure.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
