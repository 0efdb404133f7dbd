"""Replicas are made equal by broadcast_module and judged by verify_replicas."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from miniddp import replicate
from miniddp.launch import RankResults
from miniddp.process import device
from miniddp.replicate import broadcast_module, verify_replicas

from .ranks import run


class Everything(nn.Module):
    """Every kind of tensor that a module may hold, filled from torch's current seed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.tied = self.linear
        self.norm = nn.BatchNorm1d(4)
        self.transposed = nn.Parameter(torch.randn(5, 3).t())
        self.bf16 = nn.Parameter(torch.randn(3).bfloat16(), requires_grad=False)
        self.images = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
        self.register_buffer("complex", torch.randn(2, dtype=torch.complex64))
        self.register_buffer("short", torch.randint(99, (3,), dtype=torch.int16))
        self.register_buffer("flags", torch.rand(9) > 0.5)
        self.register_buffer("tiny", torch.randn(4).to(torch.float8_e4m3fn))
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("temporary", torch.randn(2), persistent=False)
        self.register_buffer("scalar", torch.randn(()))
        self.register_buffer("column", torch.randn(4, 3)[:, 1])
        self.register_buffer("window", torch.randn(6).unfold(0, 3, 3))


def tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t.detach() for name, t in [*module.named_parameters(), *module.named_buffers()]}


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.to(torch.complex128) for name, tensor in tensors(module).items()}


def layouts(module: nn.Module) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    return [(tensor.dtype, tensor.stride()) for tensor in tensors(module).values()]


def seeded(seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def verdict(module: nn.Module, *args: Any) -> str:
    try:
        verify_replicas(module, *args)
    except ValueError as error:
        return str(error)
    return "equal"


def with_a_different_value(rank: int) -> nn.Module:
    module = seeded(0, Everything)
    if rank == 1:
        module.norm.running_var[2] += 0.25
        module.norm.running_var[3] -= 0.5
    return module


def with_an_extra_bias(rank: int) -> nn.Module:
    return seeded(0, lambda: nn.Linear(2, 2, bias=rank == 2))


def with_another_name(rank: int) -> nn.Module:
    module = nn.Module()
    module.register_parameter("b" if rank == 1 else "a", nn.Parameter(torch.zeros(1)))
    return module


def with_a_buffer_for_a_parameter(rank: int) -> nn.Module:
    module = nn.Module()
    if rank == 1:
        module.register_buffer("a", torch.zeros(1))
    else:
        module.register_parameter("a", nn.Parameter(torch.zeros(1)))
    return module


BROKEN: dict[str, Callable[[int], nn.Module]] = {
    "value": with_a_different_value,
    "count": with_an_extra_bias,
    "name": with_another_name,
    "kind": with_a_buffer_for_a_parameter,
    "shape": lambda rank: nn.Linear(2, 3 + rank),
    "dtype": lambda rank: seeded(0, lambda: nn.Linear(2, 2)).to(
        torch.float16 if rank == 0 else torch.float32
    ),
    "frozen": lambda rank: seeded(0, lambda: nn.Linear(2, 2)).requires_grad_(rank != 1),
    "device": lambda rank: nn.Linear(2, 2, device="meta" if rank == 1 else device()),
    "meta": lambda rank: nn.Linear(2, 2, device="meta"),
}

EXPECTED = {
    "value": r"replicas differ: buffer 'norm.running_var' \(\(4,\) torch.float32 (cpu|cuda) "
    r"#\w{16}\) on rank 0, buffer 'norm.running_var' \(\(4,\) torch.float32 (cpu|cuda) "
    r"#\w{16}\) on rank 1",
    "count": r"replicas differ: nothing on rank 0, parameter 'bias' \(\(2,\) torch.float32 "
    r"(cpu|cuda) trained #\w{16}\) on rank 2",
    "name": r"replicas differ: parameter 'a' \(.*\) on rank 0, parameter 'b' \(.*\) on rank 1",
    "kind": r"replicas differ: parameter 'a' \(.*\) on rank 0, buffer 'a' \(.*\) on rank 1",
    "shape": r"replicas differ: parameter 'weight' \(\(3, 2\) .*\) on rank 0, "
    r"parameter 'weight' \(\(4, 2\) .*\) on rank 1",
    "dtype": r"replicas differ: parameter 'weight' \(.* torch.float16 .*\) on rank 0, "
    r"parameter 'weight' \(.* torch.float32 .*\) on rank 1",
    "frozen": r"replicas differ: parameter 'weight' \(.* (cpu|cuda) trained #.*\) on rank 0, "
    r"parameter 'weight' \(.* (cpu|cuda) #.*\) on rank 1",
    "device": r"replicas differ: parameter 'weight' \(.* (cpu|cuda) .*\) on rank 0, "
    r"parameter 'weight' \(.* meta .*\) on rank 1",
    "meta": r"parameter 'weight' is on meta, but the process group only has "
    r"(cpu:gloo,)?cuda:(gloo|nccl): call module.to\(device\) first",
}


def judge(rank: int) -> dict[str, Any]:
    """What every rank sees of replicas that are broken, then repaired."""
    seen: dict[str, Any] = {name: verdict(make(rank)) for name, make in BROKEN.items()}
    seen["structure only"] = verdict(with_a_different_value(rank), None, False)

    module = seeded(rank, Everything)
    seen["seeds differ"] = verdict(module)
    seen["before"] = values(module)
    before = layouts(module)
    broadcast_module(module, src=2)
    seen["after"] = values(module)
    seen["layouts kept"] = layouts(module) == before
    seen["repaired"] = verdict(module)
    seen["no tensors"] = verdict(nn.ReLU())

    part = dist.new_group([1, 2])
    if rank > 0:
        seen["part"] = verdict(seeded(rank, lambda: nn.Linear(2, 2)), part)
        small = seeded(rank, lambda: nn.Linear(2, 2))
        broadcast_module(small, part, src=1)
        seen["part repaired"] = verdict(small, part)
        seen["part weight"] = small.weight.detach()
        seen["weight of rank 2"] = seeded(2, lambda: nn.Linear(2, 2)).weight.detach()
    return seen


@pytest.fixture(scope="module")
def seen() -> RankResults:
    return run(judge, 3)


@pytest.mark.parametrize("name", BROKEN)
def test_every_rank_learns_what_differs(seen: RankResults, name: str) -> None:
    (message,) = {on_rank[name] for on_rank in seen}
    assert re.fullmatch(EXPECTED[name], message)


def test_values_can_be_left_out(seen: RankResults) -> None:
    assert [on_rank["structure only"] for on_rank in seen] == ["equal"] * 3


def test_seeds_that_differ_are_named(seen: RankResults) -> None:
    for on_rank in seen:
        assert "replicas differ: parameter 'transposed' (" in on_rank["seeds differ"]


def test_broadcast_copies_every_tensor_of_the_source(seen: RankResults) -> None:
    source = seen[2]["before"]
    random = [name for name in source if not name.startswith("norm.") and name != "empty"]
    assert len(random) == 13
    for name in random:
        assert not torch.equal(source[name], seen[0]["before"][name]), name
    for on_rank in seen:
        assert on_rank["layouts kept"]
        assert on_rank["repaired"] == "equal"
        for name, tensor in on_rank["after"].items():
            assert torch.equal(tensor, source[name]), name


def test_a_module_without_tensors_is_equal(seen: RankResults) -> None:
    assert [on_rank["no tensors"] for on_rank in seen] == ["equal"] * 3


def test_a_part_of_the_ranks(seen: RankResults) -> None:
    for rank in (1, 2):
        assert re.search(
            r"'weight' \(.*\) on rank 1, .*'weight' \(.*\) on rank 2", seen[rank]["part"]
        )
        assert seen[rank]["part repaired"] == "equal"
        assert torch.equal(seen[rank]["part weight"], seen[rank]["weight of rank 2"])


@pytest.mark.parametrize("function", [broadcast_module, verify_replicas])
def test_no_process_group(function: Callable[[nn.Module], None]) -> None:
    with pytest.raises(RuntimeError, match="there is no process group"):
        function(nn.Linear(1, 1))


def sent_by(fn: Callable[[], None]) -> list[int]:
    """The elements of each broadcast, largest first.

    Gloo's threads run two broadcasts side by side: torch's profiler shows them in the
    order in which they began.
    """
    with torch.profiler.profile(record_shapes=True) as profile:
        fn()
    events = [event for event in profile.events() if event.name.endswith(":broadcast")]
    return sorted((math.prod(event.input_shapes[0]) for event in events), reverse=True)


def large_and_empty(rank: int) -> tuple[list[int], torch.Tensor]:
    replicate.MESSAGE_BYTES = 64
    module = nn.Module()
    module.register_buffer("empty", torch.empty(0))
    module.register_buffer("large", torch.full((30,), float(rank)))
    module.register_buffer("small", torch.full((3,), float(rank)))
    sent = sent_by(lambda: broadcast_module(module))
    broadcast_module(nn.ModuleList())
    return sent, torch.cat([module.large, module.small])


def test_messages_have_a_cap_and_none_is_empty() -> None:
    for sent, values in run(large_and_empty, 2):
        assert sent == [30, 3]
        assert not values.any()


def gaps(rank: int) -> tuple[torch.Tensor, list[int]]:
    """A buffer that is every second column of a table, and how many messages were sent."""
    table = torch.full((3, 4), float(rank))
    module = nn.Module()
    module.register_buffer("even", table[:, ::2])
    module.register_buffer("scalar", torch.tensor(float(rank)))
    module.register_buffer("mask", torch.tensor([rank == 0, True]))
    module.register_parameter("scale", nn.Parameter(torch.full((3,), float(rank)).half()))
    sent = sent_by(lambda: broadcast_module(module))
    assert module.mask.all()
    assert not module.scale.any()
    assert not module.scalar.any()
    return table, sent


def test_a_broadcast_leaves_the_gaps_of_a_buffer_alone_and_takes_a_message_for_each_dtype() -> None:
    for rank, (table, sent) in enumerate(run(gaps, 2)):
        assert not table[:, ::2].any()
        assert (table[:, 1::2] == rank).all()
        assert sent == [7, 3, 2]
