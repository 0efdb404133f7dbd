"""Where miniddp and torch differ: what each of the two does, both seen. And what only torch has."""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data.distributed import DistributedSampler as TorchSampler

import miniddp
from miniddp import hooks, ring, zero
from miniddp.launch import run_ranks

from ..parity import row
from .ddp_cases import Mlp, TwoPaths, assert_differs_between_ranks, assert_equal_on_all_ranks

TorchDDP = nn.parallel.DistributedDataParallel
OurDDP = miniddp.DistributedDataParallel


def on_two_ranks(case: Callable[[int], None]) -> None:
    run_ranks(quietly, 2, case)


def quietly(rank: int, case: Callable[[int], None]) -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(rank)
    case(rank)


def inputs() -> Tensor:
    return torch.randn(3, 5)


def a_gradient_is_missing(rank: int) -> None:
    theirs, ours = TorchDDP(TwoPaths()), OurDDP(TwoPaths())
    theirs(inputs(), True).sum().backward()
    with pytest.raises(RuntimeError, match="finished reduction in the prior iteration"):
        theirs(inputs(), True)
    with pytest.raises(RuntimeError, match=r"'right.weight' \(on 2 of 2 ranks\)"):
        ours(inputs(), True).sum().backward()


@row(
    "differ",
    says="A parameter gets no gradient, `find_unused_parameters=False`.",
    torch="This backward passes; the next forward raises.",
    miniddp="This backward raises on every rank and names the parameters.",
)
def test_a_gradient_is_missing() -> None:
    on_two_ranks(a_gradient_is_missing)


def two_forwards_then_two_backwards(rank: int) -> None:
    for wrap in (TorchDDP, OurDDP):
        ddp = wrap(Mlp())
        losses = [ddp(inputs()).sum() for _ in range(2)]
        for loss in losses:
            loss.backward()
        (assert_equal_on_all_ranks if wrap is OurDDP else assert_differs_between_ranks)(ddp)


@row(
    "differ",
    says="Two forward passes, then a backward pass for each.",
    torch="The second is not averaged, without a word.",
    miniddp="Both are averaged.",
)
def test_two_forwards_then_two_backwards() -> None:
    on_two_ranks(two_forwards_then_two_backwards)


def two_backwards_through_one_forward(rank: int) -> None:
    theirs, ours = TorchDDP(Mlp()), OurDDP(Mlp())
    for ddp in (theirs, ours):
        loss = ddp(inputs()).square().sum()
        loss.backward(retain_graph=True)
        assert_equal_on_all_ranks(ddp)
        if ddp is ours:
            with pytest.raises(RuntimeError, match="backward ran again"):
                loss.backward()
        else:
            loss.backward()
            assert_differs_between_ranks(ddp)


@row(
    "differ",
    says="A second backward pass through the same forward pass.",
    torch="It is not averaged, without a word.",
    miniddp="It raises on every rank.",
)
def test_two_backwards_through_one_forward() -> None:
    on_two_ranks(two_backwards_through_one_forward)


def wrapped_twice(rank: int) -> None:
    for wrap in (TorchDDP, OurDDP):
        module = Mlp()
        first = wrap(module)
        if wrap is TorchDDP:
            wrap(module)
        else:
            with pytest.raises(ValueError, match="belongs to another"):
                wrap(module)
        del first


@row(
    "differ",
    says="A module is wrapped while another wrapper of it lives.",
    torch="It is accepted, and both wrappers reduce.",
    miniddp="A `ValueError` on every rank.",
)
def test_wrapped_twice() -> None:
    on_two_ranks(wrapped_twice)


def sparse_gradients(rank: int) -> None:
    tokens = torch.tensor([rank, 3])
    for wrap in (TorchDDP, OurDDP):
        ddp = wrap(nn.Embedding(5, 2, sparse=True))
        if wrap is TorchDDP:
            ddp(tokens).sum().backward()
            expected = torch.tensor([0.5, 0.5, 0.0, 1.0, 0.0])
            assert torch.equal(ddp.module.weight.grad.to_dense()[:, 0], expected)
        else:
            with pytest.raises(RuntimeError, match="is sparse"):
                ddp(tokens).sum().backward()


@row(
    "differ",
    says="Sparse gradients, as of `nn.Embedding(…, sparse=True)`.",
    torch="Averaged.",
    miniddp="An error that names the parameter.",
)
def test_sparse_gradients() -> None:
    on_two_ranks(sparse_gradients)


def create_graph(rank: int) -> None:
    TorchDDP(Mlp())(inputs()).square().sum().backward(create_graph=True)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        OurDDP(Mlp())(inputs()).square().sum().backward(create_graph=True)


@row(
    "differ",
    says="`backward(create_graph=True)`.",
    torch="A warning; the averaging is not part of the graph.",
    miniddp="A `RuntimeError`.",
)
def test_create_graph() -> None:
    on_two_ranks(create_graph)


def bf16_hook_over_gloo(rank: int) -> None:
    theirs, ours = TorchDDP(Mlp()), OurDDP(Mlp())
    with pytest.raises(TypeError, match="NCCL"):
        theirs.register_comm_hook(None, default_hooks.bf16_compress_hook)
    ours.register_comm_hook(None, hooks.bf16_compress_hook)
    ours(inputs()).sum().backward()
    assert_equal_on_all_ranks(ours)


@row(
    "differ",
    says="The bf16 compression hook, in a torch that was built without NCCL.",
    torch="Refused.",
    miniddp="Runs over gloo.",
)
@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
def test_bf16_hook_over_gloo() -> None:
    on_two_ranks(bf16_hook_over_gloo)


def defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {each.name: each.default for each in parameters}


@row(
    "differ",
    says="Are gradients views into the buckets unless you say otherwise?",
    torch="No: `gradient_as_bucket_view=False`.",
    miniddp="Yes: it saves one copy of all gradients.",
)
def test_defaults() -> None:
    assert defaults_of(TorchDDP.__init__)["gradient_as_bucket_view"] is False
    assert defaults_of(OurDDP.__init__)["gradient_as_bucket_view"] is True


@row(
    "differ",
    says="The size of the first bucket.",
    torch="1 MiB; no option of the wrapper changes it.",
    miniddp="`first_bucket_mb`, 1 MiB unless you say otherwise.",
)
def test_first_bucket() -> None:
    assert dist._DEFAULT_FIRST_BUCKET_BYTES == 1024 * 1024
    assert "first_bucket_mb" not in defaults_of(TorchDDP.__init__)
    assert defaults_of(OurDDP.__init__)["first_bucket_mb"] == 1


@row(
    "differ",
    says="A dataset with fewer samples than ranks, `drop_last=True`.",
    torch="Every rank gets an empty shard.",
    miniddp="A `ValueError` that gives both numbers.",
)
def test_an_empty_shard() -> None:
    assert list(TorchSampler(range(3), 4, 0, drop_last=True)) == []
    with pytest.raises(ValueError, match="3 samples for 4 ranks"):
        miniddp.DistributedSampler(range(3), 4, 0, drop_last=True)


@row(
    "differ",
    says="Go on in the middle of an epoch after a restart.",
    torch="The sampler has no state.",
    miniddp="`state_dict` and `load_state_dict`.",
)
def test_state_of_the_sampler() -> None:
    assert not hasattr(TorchSampler(range(3), 1, 0), "state_dict")
    assert miniddp.DistributedSampler(range(3), 1, 0).state_dict()


def schedule_that_changes_betas(rank: int) -> None:
    for make in (ZeroRedundancyOptimizer, zero.ShardedOptimizer):
        optimizer = make(nn.Linear(2, 1).parameters(), torch.optim.AdamW, lr=0.1)
        if make is ZeroRedundancyOptimizer:
            with pytest.raises(ValueError, match="momentum"):
                torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=9)
        else:
            torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=9)


@row(
    "differ",
    says="A `OneCycleLR` schedule on a sharded AdamW.",
    torch="Refused: the wrapper hides the default betas.",
    miniddp="Runs.",
)
def test_schedule_that_changes_betas() -> None:
    on_two_ranks(schedule_that_changes_betas)


@row(
    "differ",
    says="What a collective returns.",
    torch="A handle to wait for, with `async_op=True`.",
    miniddp="The bytes that this rank sent; it has finished when it returns.",
)
def test_what_a_collective_returns() -> None:
    for name in ("all_reduce", "reduce_scatter", "all_gather"):
        assert "async_op" in defaults_of(getattr(dist, name))
        assert inspect.signature(getattr(ring, name)).return_annotation in (int, "int")


# What only torch has: every option and method of torch's classes that miniddp lacks is listed.

DDP_OPTIONS = {
    "static_graph": "`static_graph=True`: trust that every step uses the same parameters",
    "mixed_precision": "`mixed_precision`: keep parameters and send gradients in 16 bits",
    "device_mesh": "`device_mesh`, for DDP together with tensor parallelism",
    "delay_all_reduce_named_params": "Parameters whose all-reduce is put off to a later moment",
    "bucket_cap_mb_list": "A size for each bucket",
    "batched_grad_copy": "Gradients copied into a bucket together",
    "skip_all_reduce_unused_params": "Unused parameters left out of the all-reduce",
    "output_device": "One process with several GPUs",
}
WITH_THOSE = {"param_to_hook_all_reduce", "dim", "check_reduction"}  # parts of them, or without use
DDP_METHODS = {"join": "`join()`: ranks with different numbers of batches"}
WITH_JOIN = {"join_device", "join_hook", "join_process_group"}
OF_SEVERAL_GPUS = {"gather", "scatter", "to_kwargs"}
INNER = {"will_sync_module_buffers", "broadcast_buffers"}
ZERO_OPTIONS = {
    "overlap_with_ddp": "`overlap_with_ddp`: sharded steps during backward",
    "parameters_as_bucket_view": "`parameters_as_bucket_view`: parameters sent in buckets",
}
FSDP_OPTIONS = {
    "mesh": "`mesh` of two dimensions: shards in a node, replicas between nodes",
    "mp_policy": "`mp_policy`: 16-bit compute over 32-bit shards",
    "offload_policy": "`offload_policy`: shards in CPU memory",
    "ignored_params": "`ignored_params`: parameters that stay whole",
    "shard_placement_fn": "Shards along another dimension than the first",
}
INSTEAD_OF_METHODS = {"dp_mesh_dims"}


def options(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters)


def methods(kind: type, base: type = object) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")} - set(dir(base))


LACKING = [*DDP_OPTIONS.items(), *DDP_METHODS.items(), *ZERO_OPTIONS.items(), *FSDP_OPTIONS.items()]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=row("only torch", says=text, miniddp="no"))
        for name, text in LACKING
    ],
)
def test_only_torch_has(name: str) -> None:
    ours = options(OurDDP.__init__) | methods(OurDDP) | options(zero.ShardedOptimizer.__init__)
    theirs = options(TorchDDP.__init__) | methods(TorchDDP)
    theirs |= options(ZeroRedundancyOptimizer.__init__) | options(fully_shard)
    assert name in theirs
    assert name not in ours | options(zero.FullyShardedModule.__init__)


@row(
    "only torch",
    says="Prefetch of the next layers' parameters in a fully sharded module",
    miniddp="no",
)
def test_prefetch() -> None:
    assert hasattr(FSDPModule, "set_modules_to_forward_prefetch")
    assert not methods(zero.FullyShardedModule, nn.Module) & methods(FSDPModule)


def test_nothing_that_only_torch_has_is_left_out() -> None:
    lacking = options(TorchDDP.__init__) - options(OurDDP.__init__)
    assert lacking <= DDP_OPTIONS.keys() | WITH_THOSE
    lacking = methods(TorchDDP, nn.Module) - methods(OurDDP)
    assert lacking <= DDP_METHODS.keys() | WITH_JOIN | OF_SEVERAL_GPUS | INNER
    lacking = options(ZeroRedundancyOptimizer.__init__) - options(zero.ShardedOptimizer.__init__)
    assert lacking <= ZERO_OPTIONS.keys()
    lacking = options(fully_shard) - options(zero.FullyShardedModule.__init__)
    assert lacking <= FSDP_OPTIONS.keys() | INSTEAD_OF_METHODS
