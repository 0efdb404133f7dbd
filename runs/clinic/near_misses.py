"""Cures that look right, and are not: the clinic's tests have to notice each.

A case's number is that of the chapter.
"""

import random
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from clinic import branch, clip, early, nan, norm, reentrant, same, straggler
from instruments.replicas import mean_over_ranks, spread, weights
from instruments.toy import loss_of, own_batches, small_model, train
from miniddp import SimpleDDP, set_seed
from miniddp.process import device
from miniddp.sampler import shard


def barrier_before_the_save(rank: int, folder: str) -> Tensor:
    """1: the other rank is let go when the save begins."""
    file = Path(folder) / "model.pt"
    model = small_model(seed=rank)
    dist.barrier()
    if rank == 0:
        early.save_slowly(model.state_dict(), file)
    model.load_state_dict(torch.load(file, map_location=device()))
    return model[0].weight.detach().cpu()


def save_on_every_rank(rank: int, folder: str) -> Tensor:
    """1: each rank waits for all, and loads what it has saved itself."""
    file = Path(folder) / f"model-{rank}.pt"
    model = small_model(seed=rank)
    torch.save(model.state_dict(), file)
    dist.barrier()
    model.load_state_dict(torch.load(file, map_location=device()))
    return model[0].weight.detach().cpu()


def checkpoint_what_is_detached(rank: int) -> list[Tensor]:
    """3: no error any more, and no gradient of what comes before."""
    set_seed(0)
    model = reentrant.Checkpointed(use_reentrant=False).to(device())
    model.first.register_forward_hook(
        lambda _module, _inputs, output: output.detach()
    )
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    loss_of(ddp(own_batches(rank, 1)[0])).backward()
    return [
        torch.zeros_like(p).cpu() if p.grad is None else p.grad.cpu()
        for p in model.parameters()
    ]


def checkpoint_the_first_layer_without_a_graph(rank: int) -> list[Tensor]:
    """3: the memory is saved, and the first layer does not learn."""
    set_seed(0)
    model = reentrant.Checkpointed(use_reentrant=None).to(device())
    model.first.requires_grad_(False)
    ddp = DistributedDataParallel(model)
    loss_of(ddp(own_batches(rank, 1)[0])).backward()
    return gradients_or_zeros(model)


def evaluate_on_rank_0_with_company(rank: int) -> float:
    """4: the other rank takes part in the call, with nothing."""
    ddp = DistributedDataParallel(small_model())
    train(ddp, own_batches(rank, 2))
    if rank == 0:
        return branch.evaluate(ddp.module, own_batches(rank, 1)[0])
    loss = torch.zeros((), device=device())
    dist.all_reduce(loss)
    return loss.item()


def evaluate_the_own_batch(rank: int) -> float:
    """4: nobody waits, and each rank has another number."""
    ddp = DistributedDataParallel(small_model())
    train(ddp, own_batches(rank, 2))
    with torch.no_grad():
        return loss_of(ddp.module(own_batches(rank, 1)[0])).item()


def train_to_the_shortest(rank: int) -> tuple[int, float]:
    """5: nobody waits, and a batch is never seen."""
    ddp = DistributedDataParallel(small_model())
    batches = own_batches(rank, 4 - rank)
    shortest = torch.tensor(len(batches))
    dist.all_reduce(shortest, dist.ReduceOp.MIN)
    train(ddp, batches[: int(shortest)])
    return int(shortest), spread(ddp)


def train_the_rest_without_sync(rank: int) -> tuple[int, float]:
    """5: nobody waits, and the last batch counts on its own rank only."""
    ddp = DistributedDataParallel(small_model())
    batches = own_batches(rank, 4 - rank)
    train(ddp, batches[:3])
    with ddp.no_sync():
        train(ddp, batches[3:])
    return len(batches), spread(ddp)


def steps_until(rank: int, leaves: Callable[[Tensor], bool]) -> int:
    """How many steps a rank takes until `leaves(loss)` says that it is done."""
    ddp = DistributedDataParallel(small_model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    steps = 0
    for inputs in own_batches(rank, 40):
        steps += 1
        loss = loss_of(ddp(inputs * (1 + rank)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if leaves(loss):
            break
    return steps


def ask_only_when_done(rank: int) -> int:
    """6: a rank asks the others when its own loss is small: no answer."""

    def leaves(loss: Tensor) -> bool:
        return loss.item() < 0.01 and mean_over_ranks(loss).item() < 0.01

    return steps_until(rank, leaves)


def wait_before_leaving(rank: int) -> int:
    """6: who is done waits for the others, who wait for its gradients."""

    def leaves(loss: Tensor) -> bool:
        is_done = loss.item() < 0.01
        if is_done:
            dist.barrier()
        return is_done

    return steps_until(rank, leaves)


def shuffle_by_rank(rank: int) -> list[int]:
    """7: each rank reads all data, in an order of its own."""
    set_seed(rank)
    loader = DataLoader(range(same.SAMPLES), batch_size=4, shuffle=True)
    return [sample for batch in loader for sample in batch.tolist()]


def every_second_of_an_own_order(rank: int) -> list[int]:
    """7: the right share, of orders that differ."""
    set_seed(rank)
    order = torch.randperm(same.SAMPLES).tolist()
    return order[rank :: dist.get_world_size()]


def copy_the_weights_at_the_end(rank: int) -> Tensor:
    """8: the replicas are equal, and only rank 0's batches were learned."""
    ddp = DistributedDataParallel(small_model())
    train(ddp.module, own_batches(rank, 5))
    for parameter in ddp.parameters():
        dist.broadcast(parameter.data, 0)
    return weights(ddp)


def call_the_wrapper_without_gradients(rank: int) -> Tensor:
    """8: it prepares to average only where gradients are recorded."""
    ddp = DistributedDataParallel(small_model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for inputs in own_batches(rank, 5):
        optimizer.zero_grad()
        with torch.no_grad():
            ddp(inputs)
        loss_of(ddp.module(inputs)).backward()
        optimizer.step()
    return weights(ddp)


def find_what_is_unused(rank: int) -> Tensor:
    """9: the reducer looks only through the parameters that it knows."""
    model = small_model()
    model[0].requires_grad_(False)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    train(ddp, own_batches(rank, 2))
    model[0].requires_grad_(True)
    train(ddp, own_batches(rank, 3))
    return weights(model)


def add_up_what_is_unfrozen(rank: int) -> Tensor:
    """9: all-reduced by hand, as a sum."""
    model = small_model()
    model[0].requires_grad_(False)
    ddp = DistributedDataParallel(model)
    train(ddp, own_batches(rank, 2))
    model[0].requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs in own_batches(rank, 3):
        optimizer.zero_grad()
        loss_of(ddp(inputs)).backward()
        for parameter in model[0].parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
    return weights(model)


def clip_to_a_share(rank: int) -> Tensor:
    """10: each rank clips its own to half the norm, and they are added."""
    ddp = SimpleDDP(small_model())
    clip.unequal_loss(ddp, [rank]).backward()
    nn.utils.clip_grad_norm_(
        ddp.parameters(), max_norm=1.0 / dist.get_world_size()
    )
    ddp.sync_gradients()
    for parameter in ddp.parameters():
        parameter.grad *= dist.get_world_size()
    return clip.flat_gradient(ddp)


def clip_each_parameter(rank: int) -> Tensor:
    """10: after the mean, but each gradient by its own norm."""
    ddp = SimpleDDP(small_model())
    clip.unequal_loss(ddp, [rank]).backward()
    ddp.sync_gradients()
    for parameter in ddp.parameters():
        nn.utils.clip_grad_norm_(parameter, max_norm=1.0)
    return clip.flat_gradient(ddp)


def average_mean_and_variance(rank: int) -> list[float]:
    """11: the variance forgets how far the ranks are apart."""
    ddp = DistributedDataParallel(
        norm.normalised_model(), forward_sync_buffers=False
    )
    for inputs in norm.shifted_batches(rank):
        loss_of(ddp(inputs)).backward()
    for buffer in (ddp.module[0].running_mean, ddp.module[0].running_var):
        buffer.copy_(mean_over_ranks(buffer))
    return norm.evaluate_normalisation(ddp.module[0])


def average_after_each_step(rank: int) -> list[float]:
    """11: the ranks never come apart: the variance between them is lost."""
    ddp = DistributedDataParallel(norm.normalised_model())
    for inputs in norm.shifted_batches(rank):
        loss_of(ddp(inputs)).backward()
        norm.merge_statistics(ddp.module[0])
    return norm.evaluate_normalisation(ddp.module[0])


def look_at_the_own_loss(rank: int) -> bool:
    """12: the rank with the NaN skips, the others take its gradients."""
    ddp = DistributedDataParallel(small_model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for inputs in nan.batches_with_a_bad_one(rank):
        loss = loss_of(ddp(inputs))
        optimizer.zero_grad()
        loss.backward()
        if loss.isfinite():
            optimizer.step()
    return all(
        parameter.isfinite().all().item() for parameter in ddp.parameters()
    )


def clip_and_step(rank: int) -> bool:
    """12: a norm that is NaN makes every gradient NaN."""
    ddp = DistributedDataParallel(small_model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for inputs in nan.batches_with_a_bad_one(rank):
        optimizer.zero_grad()
        loss_of(ddp(inputs)).backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), max_norm=1.0)
        optimizer.step()
    return all(
        parameter.isfinite().all().item() for parameter in ddp.parameters()
    )


def shards_from_both_ends(rank: int, probe: bool = False) -> dict[str, float]:
    """13: equal numbers of sequences, the short ones for one rank."""
    lengths = straggler.lengths_of_the_data()
    half = len(lengths) // 2
    mine = lengths[:half] if rank == 0 else lengths[half:][::-1]
    return straggler.work_on(mine, probe)


def blocks_that_are_shuffled(
    rank: int, probe: bool = False
) -> dict[str, float]:
    """13: another order within the block, and as many tokens as before."""
    lengths = straggler.lengths_of_the_data()
    mine = [lengths[i] for i in shard(len(lengths), 2, rank, contiguous=True)]
    random.Random(rank).shuffle(mine)
    return straggler.work_on(mine, probe)


def gradients_or_zeros(model: nn.Module) -> list[Tensor]:
    gradients = []
    for parameter in model.parameters():
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        gradients.append(gradient.cpu())
    return gradients


def detach_output(
    _module: nn.Module, _inputs: object, output: Tensor
) -> Tensor:
    return output.detach()
