"""Rank 0 saves, whole or not at all; all ranks resume from the same file.

torchrun --standalone --nproc_per_node=2 runs/pytorch/09_training.py
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def save(path, ddp, optimizer, step):
    if dist.get_rank() == 0:
        state = {
            "model": ddp.module.state_dict(),  # its names have no "module."
            "optimizer": optimizer.state_dict(),
            "step": step,
        }
        torch.save(state, f"{path}.unfinished")
        os.replace(f"{path}.unfinished", path)
    dist.barrier()  # nobody reads it, or ends, before it is there


def resume(path, ddp, optimizer, device):
    """The steps that are done; call it after wrapping, on every rank."""
    found = [os.path.exists(path)]
    dist.broadcast_object_list(found, src=0)  # rank 0 decides for all
    if not found[0]:
        return 0
    state = torch.load(path, map_location=device, weights_only=True)
    ddp.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    path = f"{folder[0]}/last.pt"
    batches = torch.randn(6, 2, 4)[:, rank]

    def train(stop):
        torch.manual_seed(rank)  # other weights, until they are wrapped
        ddp = DistributedDataParallel(nn.Linear(4, 1))
        optimizer = torch.optim.Adam(ddp.parameters())
        done = resume(path, ddp, optimizer, "cpu")
        for step in range(done, stop):
            ddp(batches[step]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return ddp, optimizer

    whole, _ = train(6)
    half, optimizer = train(3)
    save(path, half, optimizer, 3)
    resumed, _ = train(6)
    assert torch.equal(whole.module.weight, resumed.module.weight)
    assert not torch.equal(half.module.weight, resumed.module.weight)
    if rank == 0:
        os.remove(path)
        os.rmdir(folder[0])  # nothing unfinished is left in it
    del whole, half, resumed
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
