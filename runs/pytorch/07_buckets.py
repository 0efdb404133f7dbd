"""The buckets that torch's class sends, and a step that sends nothing.

torchrun --standalone --nproc_per_node=2 runs/pytorch/07_buckets.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import (
    noop_hook,
)
from torch.nn.parallel import DistributedDataParallel


def wrap(model, gpus=None, cap=None, send=True):
    ddp = DistributedDataParallel(
        model, device_ids=gpus, bucket_cap_mb=cap, gradient_as_bucket_view=True
    )
    if not send:  # to time a step without communication, never to train
        ddp.register_comm_hook(None, noop_hook)
    return ddp


def bucket_bytes(ddp):
    """As they are sent, after three steps; before, those of the first step."""
    data = ddp._get_ddp_logging_data()
    sizes = data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]
    return [int(size) for size in sizes.split(",")]


def main():
    dist.init_process_group("gloo")
    model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(4)])
    inputs = torch.full((8, 256), 1.0 + dist.get_rank())
    layer = 256 * 256 * 4  # bytes
    ddp = wrap(model, cap=0.5)
    assert bucket_bytes(ddp) == [4 * layer]
    for _ in range(3):
        ddp(inputs).sum().backward()
    assert bucket_bytes(ddp) == [2 * layer, 2 * layer]
    view = model[0].weight.grad
    assert view.untyped_storage().nbytes() == 2 * layer  # of the bucket

    model.zero_grad()
    ddp = wrap(model, send=False)
    ddp(inputs).sum().backward()
    other = model[3].weight.grad.clone()
    dist.broadcast(other, src=0)
    equal = torch.equal(other, model[3].weight.grad)
    assert equal == (dist.get_rank() == 0)  # each has its own
    del ddp
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
