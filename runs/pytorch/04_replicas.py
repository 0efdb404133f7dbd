"""Equal weights and buffers, and dropout masks of each rank's own.

torchrun --standalone --nproc_per_node=2 runs/pytorch/04_replicas.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def wrap(model, device):
    if device.type == "cuda":  # before wrapping; on a CPU it cannot run
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    gpus = [device] if device.type == "cuda" else None
    ddp = DistributedDataParallel(model.to(device), device_ids=gpus)
    torch.manual_seed(1 + dist.get_rank())  # for dropout, after the weights
    return ddp


def are_equal(tensors):
    """Whether all ranks hold the same bits; every rank has to call it."""
    mine = torch.cat([tensor.detach().flatten() for tensor in tensors])
    others = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(others, mine)
    return all(torch.equal(mine, other) for other in others)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    assert not are_equal(model.parameters())
    ddp = wrap(model, torch.device("cpu"))
    assert are_equal(ddp.parameters())

    inputs = torch.randn(64, 4)  # drawn after wrapping: each rank's own
    assert not are_equal([inputs])
    ddp(inputs).sum().backward()
    mean = ddp.module[1].running_mean
    assert not are_equal([mean])  # until the next forward
    before = mean.clone()
    ddp.eval()
    ddp(inputs)
    assert are_equal([mean])
    assert torch.equal(mean, before) == (dist.get_rank() == 0)
    del ddp
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
