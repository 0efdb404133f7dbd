"""What torch's class does with a bucket, as a hook of your own.

torchrun --standalone --nproc_per_node=2 runs/pytorch/06_sync.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def average(group, bucket):
    """Divide, start the all-reduce, go back to backward without waiting."""
    buffer = bucket.buffer().div_(dist.get_world_size(group))
    work = dist.all_reduce(buffer, group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    inputs = torch.randn(dist.get_world_size(), 8, 4)[dist.get_rank()]
    gradients = []
    for hook in None, average:
        ddp = DistributedDataParallel(model)
        if hook:
            ddp.register_comm_hook(None, hook)
        ddp(inputs).square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
        del ddp
    # Torch multiplies by 1 / N, with the bits of a division if N is 1 or 2.
    exact = {"rtol": 0, "atol": 0} if dist.get_world_size() <= 2 else {}
    torch.testing.assert_close(*gradients, **exact)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
