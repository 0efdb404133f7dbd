"""A start on CPUs, on one GPU or on several; calls that differ are named.

torchrun --standalone --nproc_per_node=2 runs/pytorch/02_ranks.py
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def start():
    """Join the group that torchrun describes; this rank's device."""
    gpus = torch.cuda.device_count()
    if gpus < int(os.environ["LOCAL_WORLD_SIZE"]):  # NCCL needs one for each
        dist.init_process_group("gloo", timeout=timedelta(minutes=2))
        return torch.device("cuda" if gpus else "cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def wrap(model, device):
    gpus = [device] if device.type == "cuda" else None
    return DistributedDataParallel(model.to(device), device_ids=gpus)


def main():
    device = start()
    ddp = wrap(nn.Linear(4, 1), device)
    inputs = torch.full((8, 4), 1.0 + dist.get_rank(), device=device)
    ddp(inputs).mean().backward()
    mean = (1.0 + dist.get_world_size()) / 2
    assert ddp.module.weight.grad.tolist() == [[mean] * 4]
    del ddp

    dist.set_debug_level(dist.DebugLevel.DETAIL)  # TORCH_DISTRIBUTED_DEBUG
    checked = dist.new_group()
    message = ""
    try:
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones((), device=device), group=checked)
        else:
            dist.barrier(group=checked)
    except RuntimeError as error:
        message = str(error)
    assert "Detected mismatch between collectives on ranks" in message
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
