"""SimpleDDP against one process that trains on the joined batch."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from miniddp.launch import RankResults
from miniddp.naive import SimpleDDP
from miniddp.process import device
from miniddp.replicate import broadcast_module

from .ranks import run

STEPS = 4
MICRO_BATCHES = 3
BATCH = 4
WORDS = 11
Snapshot = dict[str, Tensor]


class Net(nn.Module):
    """Embedding tied to the output, a layer norm, a frozen layer and a parameter nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 6)
        self.norm = nn.LayerNorm(6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.hidden = nn.Linear(6, 6)
        self.unused = nn.Parameter(torch.randn(3))
        self.head = nn.Linear(6, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.norm(self.frozen(self.embed(words).mean(1)).relu())
        output: Tensor = self.head(self.hidden(hidden).tanh())
        return output


def make_net(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def micro_batch(rank: int, step: int, number: int) -> tuple[Tensor, Tensor]:
    """(BATCH, 5) words and (BATCH,) targets, other ones on every rank and in every step."""
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + number)
    words = torch.randint(WORDS, (BATCH, 5), generator=generator)
    return words, torch.randint(WORDS, (BATCH,), generator=generator)


def gradients(module: nn.Module) -> Snapshot:
    named = module.named_parameters()
    return {name: p.grad.cpu().clone() for name, p in named if p.grad is not None}


def weights(module: nn.Module) -> Snapshot:
    return {name: p.detach().cpu().clone() for name, p in module.named_parameters()}


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)


def train_alone(world_size: int, micro_batches: int) -> list[tuple[Snapshot, Snapshot]]:
    """The oracle: one process, all ranks' data in one batch. Gradients and weights per step."""
    net = make_net(0)
    optimizer = optimizer_of(net)
    history = []
    for step in range(STEPS):
        parts = [micro_batch(r, step, k) for r in range(world_size) for k in range(micro_batches)]
        words, targets = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        optimizer.zero_grad()
        cross_entropy(net(words), targets).backward()
        seen = gradients(net)
        optimizer.step()
        history.append((seen, weights(net)))
    return history


def train(rank: int, micro_batches: int, sync: bool) -> list[tuple[Snapshot, Snapshot]]:
    net = make_net(rank).to(device())
    broadcast_module(net)
    ddp = SimpleDDP(net)
    optimizer = optimizer_of(ddp)
    history = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(micro_batches):
            is_last = number == micro_batches - 1
            words, targets = (t.to(net.unused.device) for t in micro_batch(rank, step, number))
            with nullcontext() if is_last else ddp.no_sync():
                (cross_entropy(ddp(words), targets) / micro_batches).backward()
                if sync:
                    ddp.sync_gradients()
            if sync and not is_last:
                assert_differs_between_ranks(gradients(net))
        seen = gradients(net)
        optimizer.step()
        history.append((seen, weights(net)))
    return history


def assert_differs_between_ranks(mine: Snapshot) -> None:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for other in everyone[1:]:
        assert set(other) == set(mine)
        assert all(not torch.allclose(other[name], everyone[0][name]) for name in other)


def assert_same(found: Snapshot, expected: Snapshot) -> None:
    assert set(found) == set(expected)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("micro_batches", [1, MICRO_BATCHES])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_rank_trains_like_one_process(world_size: int, micro_batches: int) -> None:
    expected = train_alone(world_size, micro_batches)
    for history in run(train, world_size, micro_batches, True, default_device=False):
        for found, wanted in zip(history, expected, strict=True):
            assert "unused" not in found[0]
            assert "frozen.weight" not in found[0]
            assert_same(found[0], wanted[0])
            assert_same(found[1], wanted[1])


def test_without_synchronisation_the_ranks_diverge() -> None:
    one, other = run(train, 2, 1, False, default_device=False)
    expected = train_alone(2, 1)
    for step in range(STEPS):
        for name, gradient in expected[step][0].items():
            found = one[step][0][name], other[step][0][name]
            assert not torch.allclose(*found)
            assert not torch.allclose(found[0], gradient)
            assert not torch.allclose(one[step][1][name], other[step][1][name])


# One launch of three ranks for all that is not training


def message(function: Callable[..., Any], *args: Any) -> str:
    try:
        function(*args)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def linear_with_gradient(rank: int, dtype: torch.dtype, scale: float = 1.0) -> SimpleDDP:
    torch.manual_seed(0)
    ddp = SimpleDDP(nn.Linear(3, 2).to(dtype))
    for parameter in ddp.parameters():
        parameter.grad = torch.full_like(parameter, scale * (rank + 1))
    return ddp


def synchronised(ddp: SimpleDDP) -> dict[str, Any]:
    error = message(ddp.sync_gradients)
    return {"error": error, **gradients(ddp.module)}


def missing_gradient(rank: int) -> dict[str, Any]:
    ddp = linear_with_gradient(rank, torch.float32)
    if rank != 1:
        ddp.module.bias.grad = None
    return synchronised(ddp)


def frozen_on_one_rank(rank: int) -> dict[str, Any]:
    ddp = linear_with_gradient(rank, torch.float32)
    ddp.module.bias.requires_grad_(rank == 0)
    return synchronised(ddp)


def old_gradient_of_a_frozen_parameter(rank: int) -> dict[str, Any]:
    ddp = linear_with_gradient(rank, torch.float32)
    ddp.module.bias.requires_grad_(False)
    return synchronised(ddp)


def sparse_gradient(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    ddp = SimpleDDP(nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2)))
    ddp(torch.tensor([rank])).sum().backward()
    before = ddp.module[1].weight.grad.clone()
    error = message(ddp.sync_gradients)
    return {"error": error, "unchanged": torch.equal(before, ddp.module[1].weight.grad)}


def sparse_gradient_on_one_rank(rank: int) -> dict[str, Any]:
    ddp = linear_with_gradient(rank, torch.float32)
    if rank == 1:
        ddp.module.weight.grad = ddp.module.weight.grad.to_sparse()
    return {"error": message(ddp.sync_gradients)}


def mixed_dtypes(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    ddp = SimpleDDP(nn.ModuleList(nn.Linear(3, 2).to(dtype) for dtype in DTYPES))
    torch.manual_seed(rank)
    for parameter in ddp.parameters():
        parameter.grad = torch.randn(parameter.shape).to(parameter.dtype)
    before = gradients(ddp.module)
    ddp.sync_gradients()
    return {"before": before, "after": gradients(ddp.module)}


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64)


def layouts(rank: int) -> dict[str, Any]:
    """A gradient that is dense but not contiguous, one that is a view, and an empty one."""
    module = nn.Module()
    module.register_parameter("images", nn.Parameter(torch.zeros(2, 3, 4, 4)))
    module.register_parameter("view", nn.Parameter(torch.zeros(3)))
    module.register_parameter("empty", nn.Parameter(torch.zeros(0)))
    ddp = SimpleDDP(module)
    images = torch.arange(96.0).reshape(2, 3, 4, 4) * (rank + 1)
    module.images.grad = images.to(memory_format=torch.channels_last) if rank == 1 else images
    storage = torch.full((3, 2), float(rank))
    module.view.grad = storage[:, 0]
    module.empty.grad = torch.zeros(0)
    ddp.sync_gradients()
    return {"images": module.images.grad, "view": module.view.grad, "storage": storage}


def switches(rank: int) -> dict[str, Any]:
    ddp = linear_with_gradient(rank, torch.float32)
    seen: dict[str, Any] = {"at first": ddp.do_sync}
    with ddp.no_sync():
        seen["inside"] = ddp.do_sync
        with ddp.no_sync():
            pass
        seen["after the inner one"] = ddp.do_sync
        seen["inside no_sync"] = synchronised(ddp)["weight"]
    seen["outside"] = ddp.do_sync
    try:
        with ddp.no_sync():
            raise LookupError
    except LookupError:
        seen["after an exception"] = ddp.do_sync
    ddp.disable_grad_sync()
    seen["disabled"] = ddp.do_sync
    with ddp.no_sync():
        pass
    seen["still disabled"] = ddp.do_sync
    seen["while disabled"] = synchronised(ddp)["weight"]
    ddp.enable_grad_sync()
    seen["enabled"] = ddp.do_sync
    seen["while enabled"] = synchronised(ddp)["weight"]
    return seen


def subgroup(rank: int) -> dict[str, Any]:
    """Ranks 2 and 0 form a group; rank 1 is no member."""
    group = dist.new_group([0, 2])
    module = nn.Linear(2, 1)
    with torch.no_grad():
        module.weight.fill_(3.0 if rank == 1 else 1.0)
        module.bias.zero_()
    if rank == 1:
        return {"error": message(SimpleDDP, module, group), "weight": None}
    ddp = SimpleDDP(module, process_group=group)
    ddp(torch.full((1, 2), float(rank))).sum().backward()
    seen = synchronised(ddp)
    module.bias.grad = None if rank == 2 else module.bias.grad
    return {**seen, "missing": message(ddp.sync_gradients)}


def wrapping(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    module = nn.Linear(2, 2)
    ddp = SimpleDDP(module)
    torch.manual_seed(rank)
    return {
        "differ": message(SimpleDDP, nn.Linear(2, 2)),
        "keys": list(ddp.state_dict()),
        "same": ddp.module is module,
        "copy": torch.equal(copy.deepcopy(ddp).module.weight, module.weight),
        "no parameters": message(SimpleDDP(nn.ReLU()).sync_gradients),
    }


def second_backward(rank: int) -> dict[str, Any]:
    """Backward, sync, backward, sync: the first mean must not be averaged away."""
    ddp = linear_with_gradient(rank, torch.float32)
    ddp.sync_gradients()
    for parameter in ddp.parameters():
        parameter.grad += 10 * (rank + 1)
    return synchronised(ddp)


CASES = [
    missing_gradient,
    frozen_on_one_rank,
    old_gradient_of_a_frozen_parameter,
    sparse_gradient,
    sparse_gradient_on_one_rank,
    mixed_dtypes,
    layouts,
    switches,
    subgroup,
    wrapping,
    second_backward,
]


def all_cases(rank: int) -> dict[str, dict[str, Any]]:
    seen = {case.__name__: case(rank) for case in CASES}
    half = linear_with_gradient(rank, torch.float16, 20_000.0)
    seen["large"] = synchronised(half)
    return seen


@pytest.fixture(scope="module")
def ranks() -> RankResults:
    return run(all_cases, 3)


def of(ranks: RankResults, case: str, key: str) -> list[Any]:
    return [seen[case][key] for seen in ranks]


def test_a_gradient_that_some_ranks_lack_is_named_everywhere(ranks: RankResults) -> None:
    expected = (
        "RuntimeError: parameter 'bias' has a gradient on 1 of 3 ranks: use the same parameters "
        "on all ranks"
    )
    assert of(ranks, "missing_gradient", "error") == [expected] * 3
    for rank, weight in enumerate(of(ranks, "missing_gradient", "weight")):
        assert torch.equal(weight, torch.full((2, 3), rank + 1.0)), "an error changes nothing"


def test_a_parameter_frozen_on_some_ranks_is_named_everywhere(ranks: RankResults) -> None:
    for error in of(ranks, "frozen_on_one_rank", "error"):
        assert "'bias' has a gradient on 1 of 3 ranks" in error


def test_a_frozen_parameter_keeps_its_old_gradient(ranks: RankResults) -> None:
    case = "old_gradient_of_a_frozen_parameter"
    for rank in range(3):
        assert ranks[rank][case]["error"] == "no error"
        assert torch.equal(ranks[rank][case]["bias"], torch.full((2,), rank + 1.0))
        assert torch.equal(ranks[rank][case]["weight"], torch.full((2, 3), 2.0))


def test_a_sparse_gradient_is_named_everywhere(ranks: RankResults) -> None:
    for error in of(ranks, "sparse_gradient", "error"):
        assert error.startswith("RuntimeError: parameter '0.weight' has a sparse gradient")
    assert all(of(ranks, "sparse_gradient", "unchanged"))


def test_a_sparse_gradient_of_one_rank_is_named_everywhere(ranks: RankResults) -> None:
    for error in of(ranks, "sparse_gradient_on_one_rank", "error"):
        assert error.startswith("RuntimeError: parameter 'weight' has a sparse gradient")


def test_every_dtype_is_averaged_in_its_own_dtype(ranks: RankResults) -> None:
    before, after = of(ranks, "mixed_dtypes", "before"), of(ranks, "mixed_dtypes", "after")
    assert {tensor.dtype for tensor in after[0].values()} == set(DTYPES)
    for name, tensor in after[0].items():
        assert not torch.equal(before[0][name], before[1][name])
        mean = sum(one[name].to(torch.complex128) for one in before) / 3
        close = {torch.bfloat16: 3e-2, torch.float16: 3e-3}.get(tensor.dtype, 1e-6)
        assert torch.allclose(tensor.to(torch.complex128), mean, atol=close, rtol=close)
        assert all(torch.equal(other[name], tensor) for other in after)


def test_large_half_gradients_do_not_overflow(ranks: RankResults) -> None:
    for weight in of(ranks, "large", "weight"):
        torch.testing.assert_close(weight, torch.full((2, 3), 40_000.0, dtype=torch.float16))


def test_any_memory_layout(ranks: RankResults) -> None:
    for rank in range(3):
        seen = ranks[rank]["layouts"]
        torch.testing.assert_close(seen["images"], torch.arange(96.0).reshape(2, 3, 4, 4) * 2)
        torch.testing.assert_close(seen["view"], torch.ones(3))
        assert torch.equal(seen["storage"][:, 1], torch.full((3,), float(rank)))


def test_no_sync_nests_and_restores(ranks: RankResults) -> None:
    expected = {
        "at first": True,
        "inside": False,
        "after the inner one": False,
        "outside": True,
        "after an exception": True,
        "disabled": False,
        "still disabled": False,
        "enabled": True,
    }
    for rank in range(3):
        seen = ranks[rank]["switches"]
        assert {name: seen[name] for name in expected} == expected
        assert torch.equal(seen["inside no_sync"], torch.full((2, 3), rank + 1.0))
        assert torch.equal(seen["while disabled"], torch.full((2, 3), rank + 1.0))
        assert torch.equal(seen["while enabled"], torch.full((2, 3), 2.0))


def test_a_part_of_the_ranks(ranks: RankResults) -> None:
    assert ranks[1]["subgroup"]["error"] == (
        "ValueError: rank 1 is not a member of the process group it passed"
    )
    for rank in (0, 2):
        assert torch.equal(ranks[rank]["subgroup"]["weight"], torch.ones(1, 2))
        missing = ranks[rank]["subgroup"]["missing"]
        assert "'bias' has a gradient on 1 of 2 ranks" in missing


def test_wrapping(ranks: RankResults) -> None:
    for seen in ranks:
        assert "replicas differ: parameter 'weight' (" in seen["wrapping"]["differ"]
        assert seen["wrapping"]["keys"] == ["module.weight", "module.bias"]
        assert seen["wrapping"]["same"]
        assert seen["wrapping"]["copy"]
        assert seen["wrapping"]["no parameters"] == "no error"


def test_a_second_backward_adds_to_the_mean(ranks: RankResults) -> None:
    for weight in of(ranks, "second_backward", "weight"):
        torch.testing.assert_close(weight, torch.full((2, 3), 22.0))


def test_no_process_group() -> None:
    with pytest.raises(RuntimeError, match="there is no process group"):
        SimpleDDP(nn.Linear(1, 1))
