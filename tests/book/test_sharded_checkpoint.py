"""What chapter 15 shows of checkpoints of `fully_shard`: other ranks, and one process, can load."""

import warnings

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Adam

from miniddp import run_ranks
from sharded_checkpoint import gather_whole, load_parts, save_parts


def small_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 1))


def sharded(world_size: int, seed: int) -> tuple[nn.Module, Adam]:
    warnings.simplefilter("ignore")
    model = small_model(seed)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    return model, Adam(model.parameters())


def train_and_save(rank: int, world_size: int, folder: str) -> tuple[dict[str, Tensor], float]:
    """The whole model on rank 0, and the loss of the next step."""
    model, optimizer = sharded(world_size, seed=0)
    step(model, optimizer)
    save_parts(model, optimizer, folder)
    whole = gather_whole(model)
    return whole, losses_of_two_steps(model, optimizer)


def load(rank: int, world_size: int, folder: str) -> tuple[dict[str, Tensor], float]:
    model, optimizer = sharded(world_size, seed=1)
    load_parts(model, optimizer, folder)
    whole = gather_whole(model)
    return whole, losses_of_two_steps(model, optimizer)


def step(model: nn.Module, optimizer: Adam) -> float:
    loss = model(torch.ones(2, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def losses_of_two_steps(model: nn.Module, optimizer: Adam) -> list[float]:
    """The second one shows whether Adam's state is there."""
    return [step(model, optimizer), step(model, optimizer)]


def test_another_number_of_ranks_loads_the_parts(tmp_path):
    saved = run_ranks(train_and_save, 4, 4, str(tmp_path))
    loaded = run_ranks(load, 2, 2, str(tmp_path))
    torch.testing.assert_close(loaded[0][0], saved[0][0], rtol=0, atol=0)
    for _, losses in loaded:
        torch.testing.assert_close(losses, saved[0][1])


def test_only_rank_0_gets_the_whole_model_and_a_plain_one_loads_it(tmp_path):
    saved = run_ranks(train_and_save, 4, 4, str(tmp_path))
    assert [bool(whole) for whole, _ in saved] == [True, False, False, False]
    small_model(seed=1).load_state_dict(saved[0][0])
