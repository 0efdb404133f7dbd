"""What tests of training share: a small model with known data, and runs of the real one."""

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from finetune import data
from finetune.options import Options
from finetune.train import Result
from finetune.training_step import WRAPPERS, train_step
from miniddp.launch import RankResults
from miniddp.process import device

from ..forked import fast_bin
from ..package.ranks import run

LAUNCHER = ["-m", "torch.distributed.run", "--standalone"]
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": "/no/cache"}
SHORT = Options(model="tiny", steps=5, batch_size=12, lr=1e-3, max_length=48)


@dataclass
class Output:
    loss: torch.Tensor


class Regression(nn.Module):
    """A small model whose forward pass takes a batch and returns its mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, features, labels):
        self.last_output = self.layers(features).squeeze(-1)
        return Output((self.last_output.float() - labels).square().mean())


def build_regression() -> Regression:
    torch.manual_seed(0)
    with torch.device("cpu"):  # the same weights as in the process of the tests
        module = Regression()
    return module.to(device())


def regression(samples) -> dict[str, torch.Tensor]:
    """A batch of these of 64 random samples."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(64, 4, generator=generator, device="cpu")[list(samples)].to(device())
    return {"features": features, "labels": features.sum(dim=1)}


def learn(steps, ddp="simple", weights=None, lr=0.1, **options) -> torch.Tensor:
    """The weights after these steps of SGD, each a list of micro-batches."""
    module = build_regression()
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    model = WRAPPERS[ddp](module)
    for micro_batches in steps:
        train_step(model, optimizer, micro_batches, weights, **options)
    return flat(module)


def flat(module: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(module.parameters()).detach().cpu()


def run_training(fn: Callable[..., Any], world_size: int, *args: Any) -> RankResults:
    """`run` for what makes its own tensors where they belong, as the trainer does."""
    with mock.patch.dict(os.environ, OFFLINE):
        return run(fn, world_size, *args, default_device=False, timeout=150)


def train_each(world_size: int, *runs: Options) -> list[list[Result]]:
    """The results of several runs, one after the other in the same processes, for each rank."""

    def train_one_after_the_other(rank):
        from finetune.train import train

        torch.set_num_threads(1)  # two threads on a busy machine wait for each other
        return [train(options) for options in runs]

    return run_training(train_one_after_the_other, world_size)


def write_pairs(folder: Path, count: int) -> Path:
    """The first pairs of the sample as the files that ``--data-dir`` wants."""
    folder.mkdir(exist_ok=True)
    text = "".join(data.SAMPLE.read_text("utf-8").splitlines(keepends=True)[: count + 1])
    for name in data.FILES.values():
        (folder / name).write_text(text, "utf-8")
    return folder


def environment() -> dict[str, str]:
    """With a new store for each restart: in a used one are addresses of the dead."""
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return {**os.environ, **OFFLINE, **own_store, "OMP_NUM_THREADS": "1"}


def command(
    *arguments: str,
    ranks: int | None = None,
    stderr: int = subprocess.PIPE,
    program: Sequence[str] = ("-m", "finetune"),
) -> subprocess.CompletedProcess[str]:
    """Runs the program, with torchrun where ``ranks`` is given; none of its processes is left."""
    launcher = [*LAUNCHER, f"--nproc_per_node={ranks}"] if ranks else []
    process = subprocess.Popen(
        [fast_bin() / "python", *launcher, *program, *arguments],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=170)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
