"""Random augmentation in workers that stay, seeds by rank, a batch sampler."""

import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler


def seed_worker(worker_id):
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


class Crops(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        return torch.full((3,), float(i)) + torch.rand(3), random.random(), i % 4


dist.init_process_group("gloo")
generator = torch.Generator()
generator.manual_seed(100 + dist.get_rank())
torch.manual_seed(dist.get_rank())
data = Crops()
sampler = DistributedSampler(data)
loader = DataLoader(
    data,
    batch_sampler=BatchSampler(sampler, 4, drop_last=True),
    num_workers=1,
    persistent_workers=True,
    worker_init_fn=seed_worker,
    generator=generator,
    prefetch_factor=2,
)
net = nn.parallel.DistributedDataParallel(
    nn.Sequential(nn.Linear(3, 8), nn.Dropout(), nn.Linear(8, 4))
)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for crops, _, labels in loader:
        opt.zero_grad()
        nn.functional.cross_entropy(net(crops), labels).backward()
        opt.step()
dist.destroy_process_group()
