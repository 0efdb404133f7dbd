"""Ranks that live for many programs: each program and class has a process group of its own."""

import contextlib
import gc
import multiprocessing
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch._dynamo  # optimizers and checkpoints import it: not in each worker
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import miniddp
from miniddp import hooks

from .loop import Trace
from .model import Spec
from .program import program
from .reference import reference

PACKAGE = str(Path(miniddp.__file__).parent)
CLASSES: dict[str, Any] = {
    "miniddp": miniddp.DistributedDataParallel,
    "torch": nn.parallel.DistributedDataParallel,
}
LOST = ("gloo/", "connection", "timed out", "wait timeout", "pair closure")


@dataclass
class Outcome:
    """What one rank has of a program: a trace, or an error."""

    trace: list[Any] | None = None
    error: str = ""
    kind: str = ""  # of the error
    raised_in: str = ""  # miniddp, if a statement of its own has raised it
    hangs: bool = False

    @property
    def lost_connection(self) -> bool:
        return any(word in self.error.lower() for word in LOST)


@dataclass
class Found:
    """All outcomes of a program, by rank."""

    torch: list[Outcome] = field(default_factory=list)
    miniddp: list[Outcome] = field(default_factory=list)
    reference: list[Outcome] = field(default_factory=list)


def options(spec: Spec, rank: int) -> dict[str, Any]:
    alone = spec.get("option of rank 0") if rank else None
    names = {
        "views": "gradient_as_bucket_view",
        "cap": "bucket_cap_mb",
        "find unused": "find_unused_parameters",
        "check reduction": "check_reduction",
        "broadcast buffers": "broadcast_buffers",
        "forward sync buffers": "forward_sync_buffers",
        "init sync": "init_sync",
    }
    return {option: spec[name] for name, option in names.items() if name in spec and name != alone}


def register_comm_hook(spec: Spec, which: str, model: nn.Module) -> None:
    if "comm hook" not in spec:
        return
    name = spec["comm hook"]
    state: Any = None
    if name == "powerSGD":
        source: Any = powerSGD_hook if which == "torch" else hooks
        settings = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2}
        state = source.PowerSGDState(None, **settings)
        hook = source.powerSGD_hook
    else:
        source = default_hooks if which == "torch" else hooks
        hook = getattr(source, {"allreduce": "allreduce_hook"}.get(name, f"{name}_compress_hook"))
    for module in model.modules():
        if isinstance(module, CLASSES[which]):
            module.register_comm_hook(state, hook)


def run_to_end(spec: Spec, rank: int, which: str) -> Trace:
    def wrap(module: nn.Module) -> nn.Module:
        ddp: nn.Module = CLASSES[which](module, **options(spec, rank))
        return ddp

    running = program(spec, rank, wrap, lambda model: register_comm_hook(spec, which, model))
    while True:
        try:
            next(running)
        except StopIteration as end:
            trace: Trace = end.value
            return trace


# On a rank


def outcome_of(fn: Callable[[], Any]) -> Outcome:
    try:
        return Outcome(trace=portable(fn()))
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raised_in = "torch"
        if last.filename.startswith(PACKAGE) and (last.line or "").startswith("raise "):
            raised_in = "miniddp"
        return Outcome(error=str(error), kind=type(error).__name__, raised_in=raised_in)


def portable(trace: Trace) -> list[Any]:
    """The trace, with tensors as dtype, shape and bytes: `tensor_of` takes it back."""
    return [
        (label, {name: None if t is None else as_bytes(t) for name, t in found.items()})
        for label, found in trace
    ]


def as_bytes(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    flat = tensor.to_dense().contiguous().reshape(-1)
    return tensor.dtype, tensor.shape, flat.view(torch.uint8).numpy().tobytes()


def tensor_of(sent: tuple[torch.dtype, torch.Size, bytes]) -> Tensor:
    dtype, shape, data = sent
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)


def work(rank: int, port: int, seconds: float, pipe: Connection, spoil: Any) -> None:
    """Run what comes through the pipe, until it is closed."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    silence()
    if spoil:
        spoil()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    with contextlib.suppress(EOFError):
        while True:
            number, spec = pipe.recv()
            if rank == 0:
                pipe.send(("reference", reference_outcomes(spec)))
            for which in CLASSES:
                name = f"{number} {which}"
                pipe.send((which, one_class(name, spec, rank, which, store, seconds)))


def silence() -> None:
    import os

    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)


def reference_outcomes(spec: Spec) -> list[Outcome]:
    try:
        return [Outcome(trace=portable(trace)) for trace in reference(spec)]
    except Exception as error:
        alone = Outcome(error=str(error), kind=type(error).__name__)
        return [alone] * spec["ranks"]


def one_class(name: str, spec: Spec, rank: int, which: str, store: Any, seconds: float) -> Outcome:
    """A rank that fails leaves the group at once, so that the others fail, too."""
    own_store = dist.PrefixStore(name, store)
    patience = timedelta(seconds=seconds)
    dist.init_process_group(
        "gloo", store=own_store, rank=rank, world_size=spec["ranks"], timeout=patience
    )
    outcome = outcome_of(lambda: run_to_end(spec, rank, which))
    store.set(f"{name} {rank}", "done")
    if outcome.trace is not None:
        others = [f"{name} {other}" for other in range(spec["ranks"])]
        store.wait(others, 3 * patience)
    dist.destroy_process_group()
    gc.collect()
    return outcome


# Their parent


class Ranks:
    """Some ranks, and the store where they meet. What hangs is killed, and begins anew."""

    def __init__(self, world_size: int, seconds: float = 15, spoil: Any = None) -> None:
        self.world_size = world_size
        self.seconds = seconds
        self.spoil = spoil
        self.number = 0
        self.workers: list[BaseProcess] = []
        self.one_died = False

    def start(self) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("fork")
        gc.collect()
        gc.freeze()  # what stands now is not looked at after each program
        self.pipes: list[Connection] = []
        for rank in range(self.world_size):
            mine, theirs = context.Pipe()
            arguments = (rank, self.store.port, self.seconds, theirs, self.spoil)
            worker = context.Process(target=work, args=arguments, daemon=True)
            worker.start()
            theirs.close()
            self.workers.append(worker)
            self.pipes.append(mine)

    def stop(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.join()
        self.workers = []

    def run(self, spec: Spec) -> Found:
        """Once more where a rank died: torch aborts now and then as a group ends over gloo."""
        found = self.run_once(spec)
        return self.run_once(spec) if self.one_died else found

    def run_once(self, spec: Spec) -> Found:
        self.one_died = False
        if not self.workers:
            self.start()
        self.number += 1
        if not all(worker.is_alive() for worker in self.workers):
            self.stop()
            self.start()
        for pipe in self.pipes:
            pipe.send((self.number, spec))
        answers: dict[tuple[str, int], Any] = {}
        wanted = 1 + len(CLASSES) * self.world_size
        end = monotonic() + 6 * self.seconds
        while len(answers) < wanted and monotonic() < end:
            for pipe in wait(self.pipes, timeout=1):
                try:
                    what, answer = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    self.one_died = True
                    end = 0.0
                    break
                answers[what, self.pipes.index(pipe)] = answer  # type: ignore[arg-type]
        hangs = Outcome(error="it hangs, or its process died", hangs=True)
        ranks = range(self.world_size)
        found = Found(
            torch=[answers.get(("torch", rank), hangs) for rank in ranks],
            miniddp=[answers.get(("miniddp", rank), hangs) for rank in ranks],
            reference=answers.get(("reference", 0), [hangs] * self.world_size),
        )
        if len(answers) < wanted:
            self.stop()
        return found
