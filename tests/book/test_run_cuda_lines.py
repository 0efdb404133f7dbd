"""Lines of the runs that only a GPU reaches, run here, so that a slip does not cost borrowed time.

The stand-in is a machine that says it has a GPU: functions of `torch.cuda` that do nothing, and a
mode that makes each tensor of the "GPU" on the CPU. From a run only what a function needs is
executed. What a GPU computes and how fast, the recordings show.
"""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from finetune.data import encode, load_mrpc
from finetune.model import load_model, load_tokenizer
from instruments import bench_ddp, bench_ring, clock, flops, held, remedies
from instruments.slow_step import Pairs, Settings

ROOT = Path(__file__).resolve().parents[2]
HELD = 2**20  # bytes that the stand-in always says are allocated

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")


class OnTheCPU(TorchFunctionMode):
    """What is asked for on a GPU is made on the CPU, and says that it is on a GPU."""

    def __torch_function__(self, function: Any, _: Any, args: Any = (), given: Any = None) -> Any:
        if function == Tensor.is_cuda.__get__:
            return True
        args = [self.place(value) for value in args]
        return function(*args, **{name: self.place(each) for name, each in (given or {}).items()})

    @staticmethod
    def place(value: Any) -> Any:
        on_gpu = isinstance(value, torch.device) and value.type == "cuda"
        return torch.device("cpu") if on_gpu else value


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """One rank on a machine with one GPU; what torch.cuda was asked for."""
    calls: list[str] = []

    def stand_in(name: str, answer: object = None) -> None:
        assert hasattr(torch.cuda, name), f"torch.cuda has no {name}"

        def answered(*_: object, **__: object) -> object:
            calls.append(name)
            return answer

        monkeypatch.setattr(torch.cuda, name, answered)

    for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"):
        stand_in(name)
    stand_in("set_per_process_memory_fraction")
    for name in ("memory_allocated", "max_memory_allocated"):
        stand_in(name, HELD)
    stand_in("get_device_name", "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: True)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(nn.Module, "compile", lambda *_, **__: calls.append("compile"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with OnTheCPU():
        yield calls
    dist.destroy_process_group()
    torch.set_num_threads(threads)


def bound(node: ast.stmt) -> set[str]:
    """The names that a statement of a file binds."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    if isinstance(node, ast.Assign | ast.AnnAssign):
        return {name.id for name in ast.walk(node)
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}  # fmt: skip
    return set()


def used(node: ast.stmt) -> set[str]:
    """The names that a statement takes from its file or from Python."""
    names = [name for name in ast.walk(node) if isinstance(name, ast.Name)]
    own = {name.id for name in names if isinstance(name.ctx, ast.Store)}
    own |= {inner.arg for inner in ast.walk(node) if isinstance(inner, ast.arg)}
    return {name.id for name in names if isinstance(name.ctx, ast.Load)} - own


def part_of(file: str, *names: str, **instead: object) -> SimpleNamespace:
    """Names of a file, with what they need of it; ``instead`` are taken in place of its own."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    wanted, needed = list(names), set()
    while wanted:
        name = wanted.pop()
        for node in tree.body:
            if name in bound(node) and node not in needed and not bound(node) <= instead.keys():
                needed.add(node)
                wanted += used(node)
    nodes = [node for node in tree.body if node in needed]
    space: dict[str, Any] = {**instead, "__name__": "part"}
    for node in nodes:
        exec(compile(ast.Module([node], []), file, "exec"), space)
        space.update(instead)
    return SimpleNamespace(**space)


class Model(nn.Module):
    """Takes what a language model takes, and has a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, inputs: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=(self.weight * inputs).sum())


def test_times_wait_for_the_gpu(asked: list[str]) -> None:
    timed: list[Callable[[], object]] = [
        clock.clock,
        lambda: bench_ring.timed(lambda _: None, torch.ones(1)),
        lambda: bench_ddp.timed_step(
            nn.Embedding(4, 4),
            torch.optim.SGD([nn.Parameter(torch.ones(1))]),
            torch.tensor([[0, 1]]),
        ),
    ]
    for number, take in enumerate(timed):
        asked.clear()
        take()
        assert "synchronize" in asked, number


def test_sizes_are_those_for_a_gpu(asked: list[str]) -> None:
    assert part_of("runs/15-memory.py", "SIZES").SIZES[-1] == "360m"
    assert part_of("runs/10-profile.py", "SIZE").SIZE == "25m"
    profiler = part_of("runs/10-profiler.py", "SIZE", "DEFAULT", "BOTH")
    assert (profiler.SIZE, profiler.DEFAULT) == ("25m", "the GPU's too")
    assert torch.profiler.ProfilerActivity.CUDA in profiler.BOTH
    started = part_of("runs/02-launching.py", "ranks", "gpus")
    assert (started.ranks, started.gpus) == (2, 1)  # one rank more than NCCL takes


def test_a_rank_gets_a_share_of_the_gpus_memory(asked: list[str]) -> None:
    part_of("runs/ways_to_fail.py", "uneven_lengths").uneven_lengths(0)
    assert asked == ["set_per_process_memory_fraction"]


def test_the_allocator_is_asked_for_what_a_step_holds(asked: list[str]) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = held.bytes_of_step(model, optimizer, {"inputs": torch.ones(3)})
    assert step == held.StepBytes(before=HELD, kept=0, peak=HELD)
    assert "reset_peak_memory_stats" in asked


def test_every_remedy_can_be_taken(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run = part_of("runs/10-repair.py", "SIZE", "LARGE", "MICRO_BATCHES")
    assert (run.SIZE, run.LARGE, run.MICRO_BATCHES) == ("360m", 128, 16)
    part = SimpleNamespace(share=0.1)
    breakdown = SimpleNamespace(exposed=part, families={"optimizer": part})
    monkeypatch.setattr(remedies, "trace_of", lambda *_: None)
    monkeypatch.setattr(remedies, "break_down", lambda *_: breakdown)
    monkeypatch.setattr(remedies, "pays", lambda *_: True)
    data = load_mrpc(None)
    sentences = data[:]["sentence1"] + data[:]["sentence2"]
    tokenizer = load_tokenizer(sentences, "tiny", pretrained=False)
    pairs = Pairs(list(encode(data, tokenizer, 8)), tokenizer, 1, 4, 8)
    tried = remedies.remedies(large=2)
    assert len(tried) == 11
    template = load_model("tiny", pretrained=False)
    done = remedies.repair(0, template, pairs, tried, 2, Settings(batch_size=1))
    assert not [trial.failure for trial in done.trials if not trial.kept]
    assert done.after.settings.compiled
    assert done.after.settings.tf32
    assert min(done.peaks) > 1e14
    assert len(done.faster) == len(done.faster_alike) == 2
    assert {"synchronize", "compile", "get_device_name"} <= set(asked)


@pytest.mark.parametrize(
    "file",
    ["runs/preemptible.py", "runs/pytorch/02_ranks.py", "stages/2_ranks.py", "stages/9_train.py"],
)
def test_a_rank_takes_its_gpu_and_nccl(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    started: list[str] = []
    monkeypatch.setattr(dist, "init_process_group", lambda name, **_: started.append(name))
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert part_of(file, "start").start() == torch.device("cuda", 0)
    assert (asked, started) == (["set_device"], ["nccl"])


@pytest.mark.parametrize(
    "file", ["runs/pytorch/02_ranks.py", "stages/2_ranks.py", "stages/9_train.py"]
)
@pytest.mark.usefixtures("asked")
def test_ranks_that_outnumber_the_gpus_share_them_over_gloo(
    monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    started: list[str] = []
    monkeypatch.setattr(dist, "init_process_group", lambda name, **_: started.append(name))
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    device = part_of(file, "start").start()
    assert (device.type, device.index or 0, started) == ("cuda", 0, ["gloo"])


def test_the_instruments_wait_too(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert flops.measured_peak_flops(torch.device("cuda"), torch.float32, 64) > 0
    assert "synchronize" in asked
