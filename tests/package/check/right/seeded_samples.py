"""Samples that workers augment by a seed of their own, each from its index."""

import random

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Jittered(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        random.seed(index)
        return torch.full((4,), index / 40) + random.random()


dist.init_process_group("gloo")
dataset = Jittered()
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, 2, sampler=sampler, num_workers=2, persistent_workers=True)
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs in loader:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
del loader, model
dist.destroy_process_group()
