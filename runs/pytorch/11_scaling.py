"""A job seen before it is paid for: its messages and its memory, on no device.

torchrun --standalone --nproc_per_node=2 runs/pytorch/11_scaling.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

MIB = 2**20


def plan(model, caps=(1 * MIB, 25 * MIB)):
    """Bytes of DDP's messages in their order, and of all model states."""
    ready = [p for p in model.parameters() if p.requires_grad]
    ready.reverse()
    buckets, _ = dist._compute_bucket_assignment_by_size(ready, list(caps))
    messages = [sum(ready[i].nbytes for i in bucket) for bucket in buckets]
    weights = sum(p.nbytes for p in model.parameters())
    return messages, weights + 3 * sum(messages)


def build():
    layers = [nn.Linear(512, 512) for _ in range(6)]
    return nn.Sequential(nn.Embedding(5000, 512), *layers)


def check(planned, model, cap=None):
    messages, states = planned
    assert messages[-1] >= 5000 * 512 * 4  # the embedding, undivided
    ddp = DistributedDataParallel(model, bucket_cap_mb=cap, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(ddp.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        ddp(torch.arange(8)).sum().backward()
        optimizer.step()
    sent = ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    assert messages == [int(size) for size in sent.split(",")]

    held = list(model.parameters())
    held += [parameter.grad for parameter in held]
    for state in optimizer.state.values():
        held += [state["exp_avg"], state["exp_avg_sq"]]
    assert states == sum(tensor.nbytes for tensor in held)


def main():
    dist.init_process_group("gloo")
    with torch.device("meta"):
        model = build()
    check(plan(model), build())
    check(plan(model, [3 * MIB]), build(), cap=3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
