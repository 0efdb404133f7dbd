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
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data.distributed import DistributedSampler as TorchSampler

import miniddp
from miniddp import hooks, ring, zero
from miniddp.ddp import checks

from ..parity import row
from .ddp_cases import (
    Mlp,
    TwoPaths,
    assert_differs_between_ranks,
    assert_equal_on_all_ranks,
)
from .ranks import run

TorchDDP = nn.parallel.DistributedDataParallel
OurDDP = miniddp.DistributedDataParallel


def on_two_ranks(case: Callable[[int], None]) -> None:
    run(quietly, 2, case)


def quietly(rank: int, case: Callable[[int], None]) -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(rank)
    case(rank)


def inputs() -> Tensor:
    return torch.randn(3, 5)


def a_gradient_is_missing(rank: int) -> None:
    theirs = TorchDDP(TwoPaths(), check_reduction=True)
    theirs(inputs(), True).sum().backward()
    ours = OurDDP(TwoPaths(), check_reduction=True)
    with pytest.raises(RuntimeError, match=r"'right.weight' \(on 2 of 2 ranks\)"):
        ours(inputs(), True).sum().backward()


@row(
    "differ",
    says="A parameter gets no gradient, `check_reduction=True`.",
    torch="The option has no effect: this backward passes, the next forward raises.",
    miniddp="This backward raises on every rank and names the parameters.",
)
def test_a_gradient_is_missing() -> None:
    on_two_ranks(a_gradient_is_missing)


def options_differ(rank: int) -> None:
    cap = {"bucket_cap_mb": 25 if rank else 0}
    sent: list[int] = []

    def note(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        sent.append(bucket.index())
        return default_hooks.allreduce_hook(None, bucket)

    theirs = TorchDDP(Mlp(), **cap)
    theirs.register_comm_hook(None, note)
    for _ in range(2):  # the second step has the buckets of the options
        sent.clear()
        theirs(inputs()).sum().backward()
    assert_equal_on_all_ranks(theirs)
    assert sent == list(range(6)), "one for each parameter, as rank 0 wants it"
    with pytest.raises(ValueError, match="bucket_cap_mb=0 on rank 0, bucket_cap_mb=25 on rank 1"):
        OurDDP(Mlp(), **cap)


@row(
    "differ",
    says="A `bucket_cap_mb` that differs between the ranks.",
    torch="Rank 0's buckets, without a word.",
    miniddp="The constructor raises on every rank, and names the option.",
)
def test_options_differ() -> None:
    on_two_ranks(options_differ)


def others_gradients_used_up(rank: int) -> None:
    for wrap in (TorchDDP, OurDDP):
        module = Mlp()
        ddp = wrap(module)
        last = module.second.bias
        module.first.weight.register_hook(lambda _, last=last: setattr(last, "grad", None))
        if wrap is TorchDDP:
            ddp(inputs()).sum().backward()
            assert_equal_on_all_ranks(ddp)
        else:
            with pytest.raises(RuntimeError, match=r"'second.bias' was there and is gone"):
                ddp(inputs()).sum().backward()


@row(
    "differ",
    says="A hook sets `.grad` of another parameter to `None`.",
    torch="It has a copy: `.grad` is the mean again.",
    miniddp="Raises: buckets are filled when they are full.",
)
def test_others_gradients_used_up() -> None:
    on_two_ranks(others_gradients_used_up)


def names_of_a_state(rank: int) -> None:
    theirs = get_model_state_dict(TorchDDP(nn.Linear(2, 2)))
    ours = get_model_state_dict(OurDDP(nn.Linear(2, 2)))
    assert [*theirs] == ["weight", "bias"]
    assert [*ours] == ["module.weight", "module.bias"]


@row(
    "differ",
    says="The names that `get_model_state_dict(ddp)` gives.",
    torch="Those of the module.",
    miniddp="With `module.` before each: give it `ddp.module`.",
)
def test_names_of_a_state() -> None:
    on_two_ranks(names_of_a_state)


def two_forwards_then_two_backwards(rank: int) -> None:
    for wrap in (TorchDDP, OurDDP):
        ddp = wrap(Mlp())
        losses = [ddp(inputs()).sum() for _ in range(2)]
        losses[0].backward()
        assert_equal_on_all_ranks(ddp)
        if wrap is TorchDDP:
            losses[1].backward()
            assert_differs_between_ranks(ddp)
        else:
            with pytest.raises(RuntimeError, match="averaged already"):
                losses[1].backward()


@row(
    "differ",
    says="Two forward passes, then a backward pass for each.",
    torch="The second is not averaged, without a word.",
    miniddp="The second raises on every rank.",
)
def test_two_forwards_then_two_backwards() -> None:
    on_two_ranks(two_forwards_then_two_backwards)


def backward_twice(rank: int) -> None:
    for wrap in (TorchDDP, OurDDP):
        ddp = wrap(Mlp())
        loss = ddp(inputs()).sum()
        loss.backward(retain_graph=True)
        if wrap is TorchDDP:
            loss.backward()
            assert_differs_between_ranks(ddp)
        else:
            with pytest.raises(RuntimeError, match="averaged already"):
                loss.backward()


@row(
    "differ",
    says="Two backward passes through one forward pass, with `retain_graph=True`.",
    torch="The second is not averaged, without a word.",
    miniddp="The second raises on every rank.",
)
def test_backward_twice() -> None:
    on_two_ranks(backward_twice)


def used_before_zero_grad(rank: int) -> None:
    for wrap in (TorchDDP, OurDDP):
        ddp = wrap(TwoPaths(), find_unused_parameters=True)
        with ddp.no_sync():
            ddp(inputs(), False).sum().backward()
        ddp.zero_grad()
        loss = ddp(inputs(), True).sum()
        if wrap is TorchDDP:
            with pytest.raises(RuntimeError, match="bug in DDP implementation"):
                loss.backward()
        else:
            loss.backward()
            assert ddp.module.right.weight.grad is None


@row(
    "differ",
    says="A parameter used inside `no_sync`, its gradient thrown away by `zero_grad`, then unused.",
    torch="An error that asks to be reported as a bug.",
    miniddp="It has no gradient.",
)
def test_used_before_zero_grad() -> None:
    on_two_ranks(used_before_zero_grad)


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
    theirs, ours = TorchDDP(Mlp()), OurDDP(Mlp())
    with pytest.raises(RuntimeError, match="leaf Variable"):
        theirs(inputs()).square().sum().backward(create_graph=True)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        ours(inputs()).square().sum().backward(create_graph=True)


@row(
    "differ",
    says="`backward(create_graph=True)`.",
    torch="Often an error, about a leaf that is changed in place.",
    miniddp="An error that names the option.",
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


def gradients_that_stay(rank: int) -> None:
    gradients = []
    for wrap in (TorchDDP, OurDDP):
        torch.manual_seed(0)
        ddp = wrap(Mlp(), gradient_as_bucket_view=True)
        for _ in range(2):
            ddp.zero_grad(set_to_none=False)
            ddp(inputs() + rank).square().sum().backward()
        gradients.append(ddp.module.second.weight.grad)
    theirs, ours = gradients
    torch.testing.assert_close(ours, theirs)
    assert not torch.equal(ours, theirs)


@row(
    "differ",
    says="Three ranks, `gradient_as_bucket_view=True`, `zero_grad(set_to_none=False)`.",
    torch="Divides by 3 what is in the bucket already.",
    miniddp="Multiplies by 1/3, as both do otherwise: the last bits differ.",
)
def test_gradients_that_stay_in_the_bucket() -> None:
    run(quietly, 3, gradients_that_stay)


def defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {each.name: each.default for each in parameters}


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
    miniddp="The bytes that this rank sent. Over gloo the result is there when it returns; over "
    "NCCL it is queued, as with torch's own call without `async_op`.",
)
def test_what_a_collective_returns() -> None:
    for name in ("all_reduce", "reduce_scatter", "all_gather"):
        assert "async_op" in defaults_of(getattr(dist, name))
        assert inspect.signature(getattr(ring, name)).return_annotation in (int, "int")


# What only torch has: every option and method of torch's classes that miniddp lacks is listed.

DDP_OPTIONS = {
    "static_graph": "`static_graph=True`: trust that every step uses the same parameters",
    "mixed_precision": "`mixed_precision`: compute, and send gradients, in 16 bits",
    "device_mesh": "`device_mesh`, for DDP together with tensor parallelism",
    "delay_all_reduce_named_params": "`delay_all_reduce_named_params`: parameters whose all-reduce "
    "is put off to a later moment",
    "bucket_cap_mb_list": "`bucket_cap_mb_list`: a size for each bucket",
    "batched_grad_copy": "`batched_grad_copy`: gradients copied into a bucket together",
    "skip_all_reduce_unused_params": "`skip_all_reduce_unused_params`: unused parameters left out "
    "of the all-reduce",
}
WITH_JOIN = {"join_device", "join_process_group"}
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
    "shard_placement_fn": "`shard_placement_fn`: shards along another dimension than the first",
}
INSTEAD_OF_METHODS = {"dp_mesh_dims"}


def options(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters)


def methods(kind: type, base: type = object) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")} - set(dir(base))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=row("only torch", says=text, miniddp="no"))
        for name, text in (ZERO_OPTIONS | FSDP_OPTIONS).items()
    ],
)
def test_only_torch_has(name: str) -> None:
    ours = options(zero.ShardedOptimizer.__init__) | options(zero.FullyShardedModule.__init__)
    assert name in options(ZeroRedundancyOptimizer.__init__) | options(fully_shard)
    assert name not in ours


@row("only torch", says="`join()`: ranks with different numbers of batches", miniddp="refused")
def test_join() -> None:
    assert "join" in methods(TorchDDP)
    with pytest.raises(NotImplementedError, match="has no join"):
        OurDDP.join(OurDDP.__new__(OurDDP))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=row("only torch", says=text, miniddp="refused"))
        for name, text in DDP_OPTIONS.items()
    ],
)
def test_an_option_that_is_refused(name: str) -> None:
    assert name in checks.NOT_HERE.split()
    assert name in options(TorchDDP.__init__)


@row(
    "only torch",
    says="`_ddp_params_and_buffers_to_ignore`: names that the module gives, left out",
    miniddp="refused",
)
def test_names_to_ignore() -> None:
    assert checks.IGNORED in inspect.getsource(TorchDDP)
    module = Mlp()
    setattr(module, checks.IGNORED, ["last.bias"])
    with pytest.raises(NotImplementedError, match=f"has no {checks.IGNORED}: freeze"):
        checks.check_module(module, None, None)


@row(
    "only torch",
    says="Prefetch of the next layers' parameters in a fully sharded module",
    miniddp="no",
)
def test_prefetch() -> None:
    assert hasattr(FSDPModule, "set_modules_to_forward_prefetch")
    assert not methods(zero.FullyShardedModule, nn.Module) & methods(FSDPModule)


def compiled_graphs(rank: int) -> None:
    counts = []
    for wrap in (TorchDDP, OurDDP):
        graphs: list[Any] = []

        def backend(graph: Any, _: Any, graphs: list[Any] = graphs) -> Any:
            graphs.append(graph)
            return graph

        ddp = torch.compile(wrap(Mlp(600)), backend=backend)  # over a MiB
        ddp(inputs()).sum().backward()
        counts.append(len(graphs))
    theirs, ours = counts
    assert theirs > 1
    assert ours == 1


@row(
    "only torch",
    says="A compiled graph, cut where buckets end, so that they leave during backward",
    miniddp="no",
)
def test_compiled_graphs_are_cut() -> None:
    on_two_ranks(compiled_graphs)


def test_nothing_that_only_torch_has_is_left_out() -> None:
    assert set(checks.NOT_HERE.split()) == DDP_OPTIONS.keys() | {"param_to_hook_all_reduce"}
    lacking = methods(TorchDDP, nn.Module) - methods(OurDDP)
    assert lacking <= WITH_JOIN | OF_SEVERAL_GPUS | INNER
    lacking = options(ZeroRedundancyOptimizer.__init__) - options(zero.ShardedOptimizer.__init__)
    assert lacking <= ZERO_OPTIONS.keys()
    lacking = options(fully_shard) - options(zero.FullyShardedModule.__init__)
    assert lacking <= FSDP_OPTIONS.keys() | INSTEAD_OF_METHODS
