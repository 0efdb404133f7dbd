"""A training step that can be taken in many ways: slow at first, each remedy a setting.

The slow one pads every pair to the same length, sends a message per parameter after
backward, computes in full precision and reads the loss in every step.
"""

import copy
import random
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from instruments.clock import clock, slowest
from instruments.profiling import Profiler, region
from miniddp import DistributedDataParallel, SimpleDDP
from miniddp.process import device

Row = dict[str, list[int]]
Batch = dict[str, Tensor]
Wrapped = SimpleDDP | DistributedDataParallel


@dataclass(frozen=True)
class Settings:
    """How a training step is taken. The defaults are the slow step."""

    batch_size: int = 8
    by_length: bool = False
    buckets: bool = False
    accumulation: int = 1
    tf32: bool = False
    bf16: bool = False
    attention: str = "eager"
    fused_optimizer: bool = False
    pinned: bool = False
    read_every_loss: bool = True
    compiled: bool = False


@dataclass(frozen=True)
class Pairs:
    """The encoded pairs that a pass is taken from.

    Attributes:
        rows: All of them.
        tokenizer: What pads them; of transformers.
        world_size: Ranks that share a pass.
        micro_batches: How many each of them takes in a pass.
        max_length: Tokens to which the slow step pads.
    """

    rows: list[Row]
    tokenizer: Any
    world_size: int
    micro_batches: int
    max_length: int

    def of_rank(self, rank: int, settings: Settings) -> list[list[Row]]:
        """This rank's part of each joined batch of a pass.

        The slow way takes pairs in random order. The other way has pairs of like
        lengths in a batch.
        """
        rows = sorted(self.rows, key=lambda row: len(row["input_ids"]))
        shuffle = random.Random(0).shuffle
        if not settings.by_length:
            shuffle(rows)
        size = self.world_size * settings.batch_size
        starts = range(0, len(rows) - size + 1, size)
        joined = [rows[start : start + size] for start in starts]
        count = self.micro_batches
        evenly = [joined[i * len(joined) // count] for i in range(count)]
        shuffle(evenly)
        return [batch[rank :: self.world_size] for batch in evenly]

    def pad(self, rows: list[Row], settings: Settings) -> Batch:
        """A batch, padded to the greatest length of all, or to that of its longest."""
        lengths: dict[str, Any] = {
            "padding": "max_length",
            "max_length": self.max_length,
        }
        if settings.by_length:
            lengths = {"padding": "longest", "pad_to_multiple_of": 8}
        batch = dict(self.tokenizer.pad(rows, return_tensors="pt", **lengths))
        if settings.pinned:
            return {name: tensor.pin_memory() for name, tensor in batch.items()}
        return batch

    def load(self, chunks: list[list[Row]], settings: Settings) -> Iterator[Batch]:
        for rows in chunks:
            with region("load_batch"):
                batch = self.pad(rows, settings)
            yield batch


def prepare(
    settings: Settings, template: nn.Module
) -> tuple[Wrapped, torch.optim.Optimizer]:
    """The wrapped model, a copy of the template, and its optimizer."""
    module: Any = copy.deepcopy(template).to(device())
    module.config._attn_implementation = settings.attention
    module.config.use_cache = False  # what generation of text keeps, and training drops
    if settings.compiled:
        for layer in module.model.layers:
            layer.compile()
    if settings.fused_optimizer:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, fused=True)
    else:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, foreach=False)
    if settings.buckets:
        return DistributedDataParallel(module), optimizer
    return SimpleDDP(module), optimizer


def train_pass(
    model: Wrapped,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Batch],
    settings: Settings,
    profiler: Profiler | None = None,
) -> list[float]:
    """Train on the batches; returns the loss of each."""
    torch.set_float32_matmul_precision("high" if settings.tf32 else "highest")
    losses: list[float] = []
    unread: list[Tensor] = []
    for number, host_batch in enumerate(batches, 1):
        is_last = number % settings.accumulation == 0
        with region("data_movement"):
            batch = {
                name: tensor.to(device(), non_blocking=settings.pinned)
                for name, tensor in host_batch.items()
            }
        with nullcontext() if is_last else model.no_sync():
            autocast = torch.autocast(
                device().type, torch.bfloat16, enabled=settings.bf16
            )
            with region("forward"), autocast:
                loss = model(**batch).loss / settings.accumulation
            with region("backward"):
                loss.backward()
        loss = loss.detach() * settings.accumulation
        with region("read_loss"):
            if settings.read_every_loss:
                losses.append(loss.item())
            else:
                unread.append(loss.clone())
        if not is_last:
            continue
        with region("sync_grads"):
            if isinstance(model, SimpleDDP):
                model.sync_gradients()
        with region("opt_step"):
            optimizer.step()
            optimizer.zero_grad()
        if profiler is not None:
            profiler.step()
    return losses if settings.read_every_loss else torch.stack(unread).tolist()


class Training:
    """A model, its optimizer and the batches of this rank, trained in one way.

    Attributes:
        tokens: Real ones of a pass, on all ranks.
        computed: The same with padding.
        losses: Of the first pass, which warms up.
    """

    def __init__(
        self, settings: Settings, template: nn.Module, pairs: Pairs, rank: int
    ) -> None:
        self.settings = settings
        self.pairs = pairs
        self.model, self.optimizer = prepare(settings, template)
        self.chunks = pairs.of_rank(rank, settings)
        padded = [pairs.pad(rows, settings)["input_ids"] for rows in self.chunks]
        lengths = [len(row["input_ids"]) for rows in self.chunks for row in rows]
        self.tokens = sum_over_ranks(sum(lengths))
        self.computed = sum_over_ranks(sum(tensor.numel() for tensor in padded))
        self.losses = self.train()

    def train(
        self, count: int | None = None, profiler: Profiler | None = None
    ) -> list[float]:
        """Train on so many batches, by default on all of a pass."""
        count = len(self.chunks) if count is None else count
        chunks = [self.chunks[i % len(self.chunks)] for i in range(count)]
        batches = self.pairs.load(chunks, self.settings)
        return train_pass(self.model, self.optimizer, batches, self.settings, profiler)

    def pass_seconds(self) -> float:
        """Seconds of a pass on the slowest rank."""
        dist.barrier()
        start = clock()
        self.train()
        return slowest(clock() - start)


def sum_over_ranks(count: int) -> int:
    total = torch.tensor(count, device=device())
    dist.all_reduce(total)
    return int(total.item())
