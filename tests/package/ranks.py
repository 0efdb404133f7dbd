"""Ranks on the device and over the backend that the tests were asked for (see conftest.py)."""

import functools
import multiprocessing
from collections.abc import Callable
from multiprocessing import forkserver
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from miniddp.launch import RankResults, run_ranks
from miniddp.process import device

backend = "gloo"
max_ranks: int | None = None

PRELOADED = [
    "miniddp.launch.worker",
    "cloudpickle",
    "pytest",
    "torch._dynamo",
    "torch.utils.data",
    "datasets",
    "safetensors.torch",
    "transformers.models.llama.modeling_llama",
]


@functools.cache
def start_server() -> None:
    """Ranks are forks of one server: what it has imported, if it is installed, they need not.

    `run_ranks` would start it with less. Where there are GPUs it has to (see miniddp.launch).
    """
    if not torch.cuda.is_available():
        multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
        forkserver.ensure_running()


def run(
    fn: Callable[..., Any], world_size: int, *args: Any, default_device: bool = True, **options: Any
) -> RankResults:
    """`run_ranks(fn, world_size, *args, **options)`, skipped where there are not enough ranks.

    What fn makes without saying where is on this rank's `process.device()`, unless
    `default_device` is off; the tensors that it returns come back on the CPU.
    """
    if max_ranks is not None and world_size > max_ranks:
        pytest.skip(f"needs {world_size} ranks over {backend}, here are {max_ranks}")
    start_server()
    options = {"backend": backend, **options}
    return run_ranks(_on_device, world_size, fn, default_device, *args, **options)


def _on_device(rank: int, fn: Callable[..., Any], default_device: bool, *args: Any) -> Any:
    if default_device and device().type != "cpu":
        torch.set_default_device(device())
    return tree_map_only(Tensor, Tensor.cpu, fn(rank, *args))


def gpus() -> int:
    return torch.cuda.device_count()


def all_gather(tensor: Tensor) -> list[Tensor]:
    """Each rank's tensor. gloo, which gathers none of a GPU, gathers copies on the CPU."""
    mine = tensor.detach().contiguous()
    mine = mine.cpu() if dist.get_backend() == "gloo" else mine
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return [gathered.to(tensor.device) for gathered in everyone]
