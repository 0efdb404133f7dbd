"""Run PyTorch's own tests of DistributedDataParallel, as they are, with a class of our choice.

torch's wheel ships the file that holds them. Most of its tests ask for two GPUs, and need them for
nothing but a place to put tensors. So here this rank's device, the CPU, stands in for every GPU:
`.cuda()`, `.to(0)` and `device="cuda"` all lead to it, `device_ids` are left out, and the
decorators that skip a test where there is no GPU are taken off. What torch writes into its own log
is not looked at, and a file that ranks share is not removed while one of them still reads it.
"""

import ast
import functools
import gc
import importlib.util
import inspect
import os
import re
import sys
import traceback
import types
import unittest
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import miniddp
from miniddp.process import device

Case = Callable[..., None]
MODULE = "torch.testing._internal.distributed.distributed_test"
FILE = Path(torch.__file__).parent.joinpath("testing/_internal/distributed/distributed_test.py")


@functools.cache
def torchs_tests() -> Any:
    """The module that holds torch's tests.

    Their base class comes from expecttest, which adds comparisons with recorded texts. No test in
    this file makes one, so where expecttest is not installed the class of unittest stands in.
    """
    if importlib.util.find_spec("expecttest") is None:
        stand_in: Any = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stand_in
    return importlib.import_module(MODULE)


def wrapper(implementation: str) -> Any:
    if implementation == "torch":
        return nn.parallel.DistributedDataParallel
    return miniddp.DistributedDataParallel


def tests_of_ddp() -> list[str]:
    """Tests in torch's file that build a DistributedDataParallel, themselves or in a helper."""
    source = FILE.read_text(encoding="utf-8")
    lines = source.splitlines()
    methods = {
        node.name: "\n".join(lines[node.lineno - 1 : node.end_lineno])
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
    }
    found = {name for name, text in methods.items() if re.search("ddp|parallel.Dist", text, re.I)}
    while callers := {
        name
        for name in methods.keys() - found
        if found & set(re.findall(r"\bself\.(\w+)\(", methods[name]))
    }:
        found |= callers
    return sorted(name for name in found if name.startswith("test_"))


def outcomes(
    rank: int,
    world_size: int,
    implementation: str,
    tasks: Iterable[str | Case],
    backend: str,
    folder: str,
) -> list[str]:
    """What each task raises on this rank, or "". Every task has a process group of its own.

    A task is the name of a test of torch's, or a scenario: a function of the class, the rank and
    the world size.
    """
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(world_size))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.set_debug_level(dist.DebugLevel.INFO)  # with it torch's errors name parameters
    torchs_tests()
    gc.freeze()
    gc.disable()
    groups = []  # kept: one that is freed on a thread of its own aborts the process
    raised = []
    for number, task in enumerate(tasks):
        store = dist.FileStore(f"{folder}/{number}", world_size)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=20)
        )
        raised.append(_raised_by(task, implementation, rank, world_size, f"{folder}/{number}.file"))
        gc.collect()
        groups += dist.distributed_c10d._world.pg_map
        dist.destroy_process_group()
    return raised


def _raised_by(task: str | Case, implementation: str, rank: int, world_size: int, file: str) -> str:
    torch.manual_seed(0)
    try:
        if isinstance(task, str):
            _run_test(task, implementation, rank, world_size, file)
        else:
            task(wrapper(implementation), rank, world_size)
    except BaseException as error:  # pytest.fail and sys.exit too
        return "".join(traceback.format_exception(error))
    return ""


def _run_test(name: str, implementation: str, rank: int, world_size: int, file: str) -> None:
    module = torchs_tests()
    utilities: Any = importlib.import_module("torch.testing._internal.common_utils")

    class OnThisRank(module.DistributedTest._DistTestBase, utilities.TestCase):
        def _barrier(self, **_: Any) -> None:
            dist.barrier()

    case = OnThisRank(name)
    case.rank, case.world_size = rank, str(world_size)  # text, as in torch's
    shared_file = mock.patch.object(module, "_rank_temp_file", return_value=nullcontext(file))
    ddp = _WithoutDevices(wrapper(implementation))
    with _one_device(module, ddp, rank, world_size), shared_file:
        inspect.unwrap(getattr(OnThisRank, name))(case)


@contextmanager
def _one_device(module: Any, ddp: Any, rank: int, world_size: int) -> Iterator[None]:
    parse_to = torch._C._nn._parse_to

    def parse_to_here(*args: Any, **kwargs: Any) -> Any:
        return parse_to(*map(_here, args), **{name: _here(place) for name, place in kwargs.items()})

    def nothing(*_: Any, **__: Any) -> None:
        pass

    with ExitStack() as patches:
        for owner, name, value in [
            (nn.parallel, "DistributedDataParallel", ddp),
            (module, "DistributedDataParallel", ddp),
            (module, "verify_ddp_error_logged", nothing),
            (torch._C._nn, "_parse_to", parse_to_here),
            (torch.cuda, "set_device", nothing),
            (torch.cuda, "synchronize", nothing),
            (torch.cuda, "current_device", lambda: rank),
            (torch.cuda, "device_count", lambda: world_size),
        ]:
            patches.enter_context(mock.patch.object(owner, name, value))
        patches.enter_context(_ToHere())
        yield


def _here(place: Any) -> Any:
    """This rank's device for a GPU, given as torch.device, name or number; else what it was."""
    if isinstance(place, str) and place.startswith("cuda"):
        return device()
    if isinstance(place, int) and not isinstance(place, bool):
        return device()
    return device() if isinstance(place, torch.device) and place.type == "cuda" else place


class _ToHere(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.cuda:
            return args[0].to(device())
        if "device" in kwargs:
            kwargs["device"] = _here(kwargs["device"])
        if func is Tensor.to:
            args = (args[0], *map(_here, args[1:]))
        return func(*args, **kwargs)


class _WithoutDevices:
    """The class, without the numbers of devices: torch's refuses them for a module on the CPU."""

    def __init__(self, ddp: Any) -> None:
        self.ddp = ddp

    def __call__(
        self, module: nn.Module, device_ids: Any = None, output_device: Any = None, **options: Any
    ) -> Any:
        return self.ddp(module, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ddp, name)
