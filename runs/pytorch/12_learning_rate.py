"""The rate of a larger batch with warm-up, and a hook for the noise scale.

torchrun --standalone --nproc_per_node=2 runs/pytorch/12_learning_rate.py
"""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LinearLR,
    SequentialLR,
)


def build_optimizer(parameters, rate, factor, warmup, steps):
    """For `factor` times the batch that `rate` was found with."""
    optimizer = torch.optim.AdamW(parameters, lr=rate * math.sqrt(factor))
    rise = LinearLR(optimizer, start_factor=1 / warmup, total_iters=warmup)
    fall = CosineAnnealingLR(optimizer, T_max=steps - warmup)
    return optimizer, SequentialLR(optimizer, [rise, fall], [warmup])


class NoiseScale:
    """Squared lengths of gradients: of one rank's samples, and of all."""

    def __init__(self, ddp):
        self.local = []
        self.joined = []
        ddp.register_comm_hook(self, NoiseScale.hook)

    def hook(self, bucket):
        self.local.append(bucket.buffer().square().sum())  # of a rank's mean

        def count(future):
            self.joined.append(future.value().square().sum())
            return future.value()

        return allreduce_hook(None, bucket).then(count)

    def in_samples(self, per_rank):
        """The trace of the covariance over the squared length, of all steps."""
        ranks = dist.get_world_size()
        local = sum(self.local) / ranks
        dist.all_reduce(local)  # all ranks call this: their mean is less noisy
        joined = sum(self.joined)
        noise = (local - joined) / (1 / per_rank - 1 / (ranks * per_rank))
        return (noise / (joined - noise / (ranks * per_rank))).item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(1 + dist.get_rank())
    ddp = DistributedDataParallel(nn.Linear(16, 1, bias=False))
    noise_scale = NoiseScale(ddp)
    for _ in range(200):  # a gradient is 0.5 and noise of variance 1, 16 times
        ddp(0.5 + torch.randn(4, 16)).mean().backward()
        ddp.zero_grad()
    assert 3 < noise_scale.in_samples(per_rank=4) < 5.3  # 16 * 1 / (16 / 4)

    optimizer, schedule = build_optimizer(ddp.parameters(), 0.003, 4, 10, 50)
    rates = []
    for _ in range(50):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert math.isclose(max(rates), 0.006)
    assert rates.index(max(rates)) == 10
    assert math.isclose(rates[0], 0.0006)
    assert rates[-1] < 0.0001
    del ddp, noise_scale
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
