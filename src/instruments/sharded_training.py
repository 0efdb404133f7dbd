"""Ways to train one model on several ranks: DDP, and what shards it.

A way takes a model whose blocks stand in `model.model.layers`, as those of transformers
do, and returns what to call and the optimizer. Every rank calls it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam, Optimizer

import miniddp
from instruments.held import limit_memory
from miniddp.zero import FullyShardedModule, ShardedOptimizer

Trained = tuple[nn.Module, Optimizer]
Way = Callable[[nn.Module], Trained]


def ddp(model: nn.Module) -> Trained:
    wrapped = miniddp.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return wrapped, Adam(wrapped.parameters(), lr=1e-3)


def zero1(model: nn.Module) -> Trained:
    wrapped = miniddp.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return wrapped, ShardedOptimizer(wrapped.parameters(), Adam, lr=1e-3)


def torch_zero1(model: nn.Module) -> Trained:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), Adam, lr=1e-3)


def zero3(model: Any, reshard_after_forward: bool = True) -> Trained:
    layers = model.model.layers
    for i, layer in enumerate(layers):
        layers[i] = FullyShardedModule(
            layer, reshard_after_forward=reshard_after_forward
        )
    wrapped = FullyShardedModule(model, reshard_after_forward=reshard_after_forward)
    return wrapped, Adam(wrapped.parameters(), lr=1e-3)


def zero3_keeps(model: nn.Module) -> Trained:
    """From forward to backward each rank keeps what it has gathered."""
    return zero3(model, reshard_after_forward=False)


def zero3_in_one_unit(model: nn.Module) -> Trained:
    wrapped = FullyShardedModule(model)
    return wrapped, Adam(wrapped.parameters(), lr=1e-3)


def torch_zero3(model: Any, **options: Any) -> Trained:
    kind = next(model.parameters()).device.type
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, **options)
    fully_shard(model, mesh=mesh, reshard_after_forward=True, **options)
    return model, Adam(model.parameters(), lr=1e-3)


def torch_in_bf16(model: nn.Module) -> Trained:
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
    )
    return torch_zero3(model, mp_policy=policy)


# What a way trains


def step(trained: Trained, batch: Mapping[str, Tensor]) -> None:
    """One step on this rank's part of a batch; `module(**batch)` has a `loss`."""
    module, optimizer = trained
    optimizer.zero_grad()
    module(**batch).loss.backward()
    optimizer.step()


def reached_within(
    num_bytes: float,
    way: Way,
    build: Callable[[], nn.Module],
    batch: Mapping[str, Tensor],
) -> str:
    """How far two steps get if this process may take `num_bytes` more than it has now.

    The model counts too. "two steps done", or where memory was refused. The limit
    stays: Linux, and the CPU's memory only.
    """
    limit_memory(num_bytes)
    reached = "the model"
    try:
        module, optimizer = way(build())
        for number in (1, 2):
            optimizer.zero_grad()
            reached = f"step {number}, forward"
            loss = module(**batch).loss
            reached = f"step {number}, backward"
            loss.backward()
            reached = f"step {number}, optimizer.step()"
            optimizer.step()
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        return f"{reached}: can't allocate memory"
    return "two steps done"


def difference_from_one_process(
    way: Way, build: Callable[[], nn.Module], batches: Sequence[Mapping[str, Tensor]]
) -> float:
    """Train with `way`, and on one process; the largest difference of a weight.

    A rank takes its part of each batch, the one process all of it. `build` returns the
    same model each time.
    """
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    trained = way(build())
    single = build()
    alone = (single, Adam(single.parameters(), lr=1e-3))
    for batch in batches:
        part = {name: t.chunk(world_size)[rank] for name, t in batch.items()}
        step(trained, part)
        step(alone, batch)
    weights = whole_weights(trained[0])
    return max(
        (weights[name] - value.detach().cpu()).abs().max().item()
        for name, value in single.named_parameters()
    )


def whole_weights(module: nn.Module) -> dict[str, Tensor]:
    """The weights by their names in the model, on the CPU of every rank."""
    if isinstance(module, FullyShardedModule):
        return module.full_state_dict()
    whole = {}
    for name, value in getattr(module, "module", module).state_dict().items():
        tensor = value.full_tensor() if isinstance(value, DTensor) else value
        whole[name] = tensor.cpu()
    return whole
