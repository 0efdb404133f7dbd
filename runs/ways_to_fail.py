"""Ways to fail: rank 1 of three does something else than the others, or is late.

A way is a function that every rank calls with its number.
"""

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from finetune import training_step
from finetune.options import parse_options
from finetune.train import train
from finetune.watch import watching
from instruments.held import limit_memory
from instruments.witnesses import TIMEOUT, say
from miniddp.process import device


def one_dies(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(4))


def one_skips(rank: int) -> None:
    if rank != 1:
        dist.all_reduce(torch.ones(4))
    else:
        time.sleep(2 * TIMEOUT + 2)  # such as: writes a file that only it writes


def uneven_batches(rank: int) -> None:
    for step in range(2 if rank == 1 else 3):
        dist.all_reduce(torch.ones(4))
        say(f"step {step} done")


def another_collective(rank: int) -> None:
    tensor = torch.ones(4)
    if rank == 1:
        dist.broadcast(tensor, src=0)
    else:
        dist.all_reduce(tensor)


def another_order(rank: int) -> None:
    """The sums should be 3 and 30."""
    ones = torch.full((4,), 1.0)
    tens = torch.full((4,), 10.0)
    for tensor in (tens, ones) if rank == 1 else (ones, tens):
        dist.all_reduce(tensor)
    say(f"ones: {ones[0].item():.0f}, tens: {tens[0].item():.0f}")


def another_shape(rank: int) -> None:
    tensor = torch.ones(5 if rank == 1 else 4)
    dist.all_reduce(tensor)
    say(f"result: {tensor.tolist()}")


def uneven_lengths(rank: int) -> None:
    """One text of rank 1 has 20,000 tokens, and its batch is padded to that."""
    if device().type == "cuda":
        torch.cuda.set_per_process_memory_fraction(0.02)
    else:
        limit_memory(1e9)
    longest = 20_000 if rank == 1 else 40
    attended = attend(torch.ones(4, longest, 8, device=device()))
    dist.all_reduce(attended.mean().cpu())


def attend(tokens: Tensor) -> Tensor:
    """Compares every token with every other one."""
    scores = tokens @ tokens.transpose(1, 2)
    return scores.softmax(dim=-1) @ tokens


def late_for_the_roll_call(rank: int) -> None:
    if rank == 1:
        time.sleep(2 * TIMEOUT + 2)
    dist.monitored_barrier(timeout=timedelta(seconds=TIMEOUT), wait_all_ranks=True)


# Trainings of `finetune` in which rank 1 is late in each step


def sleep_in_each_step(rank: int, options: list[str], seconds: float) -> None:
    train_late(rank, options, lambda: time.sleep(seconds))


def stuck_until_noticed(rank: int, options: list[str], noticed: Path) -> None:
    """Rank 0 writes into the file `noticed` what `finetune.watch` says."""

    def read_from_a_dead_disk() -> None:
        while not noticed.exists() or not noticed.read_text():
            time.sleep(0.1)

    if rank == 0:
        logging.getLogger("finetune.watch").addHandler(logging.FileHandler(noticed))
    train_late(rank, options, read_from_a_dead_disk)


def train_late(rank: int, options: list[str], before_a_step: Callable[[], None]) -> None:
    """Shows what `torchrun -m finetune` would: errors of any rank, warnings of rank 0."""
    level = logging.ERROR if rank else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stdout)
    in_time = training_step.train_step

    def late(*arguments: object, **named: object) -> Tensor:
        before_a_step()
        return in_time(*arguments, **named)

    if rank == 1:
        training_step.train_step = late
    with watching(timeout=20):
        train(parse_options(options))
