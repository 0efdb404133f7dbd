"""Samplers of its own: sequential blocks, an infinite shuffled one, buckets by length."""

import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler


class Infinite(Sampler):
    """All draw one endless permutation, each rank takes every n-th."""

    def __init__(self, size, seed=0):
        self.size, self.seed = size, seed

    def __iter__(self):
        return itertools.islice(self.endless(), dist.get_rank(), None, dist.get_world_size())

    def endless(self):
        g = torch.Generator()
        g.manual_seed(self.seed)
        while True:
            yield from torch.randperm(self.size, generator=g).tolist()


class Lengths(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, i):
        return torch.ones(3 + i % 5) * i


def pad(batch):
    return nn.utils.rnn.pad_sequence(batch, batch_first=True).sum(1, keepdim=True)


class Buckets(Sampler):
    def __init__(self):
        order = sorted(range(40), key=lambda i: i % 5)
        batches = [order[i : i + 4] for i in range(0, 40, 4)]
        self.batches = batches[dist.get_rank() :: dist.get_world_size()]

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


dist.init_process_group("gloo")
ddp = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
opt = torch.optim.SGD(ddp.parameters(), lr=1e-5)


def step(x):
    opt.zero_grad()
    ddp(x).sum().backward()
    opt.step()


loader = DataLoader(Lengths(), batch_size=4, sampler=Infinite(40), collate_fn=pad)
for i, x in enumerate(loader):
    step(x)
    if i == 12:
        break
for _ in range(2):
    for x in DataLoader(Lengths(), batch_sampler=Buckets(), collate_fn=pad):
        step(x)
dist.destroy_process_group()
