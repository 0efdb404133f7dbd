"""Equal weights and buffers, checked, and dropout masks of each rank's own.

torchrun --standalone --nproc_per_node=2 runs/pytorch/04_replicas.py
"""

import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def digest(tensor):
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def verify(state):
    """Raise on every rank unless all ranks hold the same bits in `state`."""
    mine = {name: digest(tensor) for name, tensor in state.items()}
    replicas = [None] * dist.get_world_size()
    dist.all_gather_object(replicas, mine)
    for name in sorted(set().union(*replicas)):
        if len({replica.get(name) for replica in replicas}) > 1:
            raise ValueError(f"{name} is not the same on all ranks")


def wrap(model, device):
    if device.type == "cuda":  # before wrapping; on a CPU it cannot run
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    gpus = [device] if device.type == "cuda" else None
    ddp = DistributedDataParallel(model.to(device), device_ids=gpus)
    torch.manual_seed(1 + dist.get_rank())  # for dropout, after the weights
    return ddp


def differs(state):
    try:
        verify(state)
    except ValueError:
        return True
    return False


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    assert differs(model.state_dict())
    ddp = wrap(model, torch.device("cpu"))
    verify(ddp.state_dict())

    inputs = torch.randn(64, 4)  # drawn after wrapping: each rank's own
    assert differs({"inputs": inputs})
    assert differs({f"of rank {dist.get_rank()}": inputs})
    ddp(inputs).sum().backward()
    buffers = dict(ddp.named_buffers())
    assert differs(buffers)  # until the next forward
    mean = ddp.module[1].running_mean
    before = mean.clone()
    ddp.eval()
    ddp(inputs)
    verify(buffers)
    assert torch.equal(mean, before) == (dist.get_rank() == 0)
    del ddp
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
