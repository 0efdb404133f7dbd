"""An endless sampler that splits, in the style of MMEngine; each rank soon reads all samples."""

import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset


class InfiniteSampler(Sampler):
    def __init__(self, dataset, seed=0):
        self.size = len(dataset)
        self.seed = seed

    def __iter__(self):
        yield from itertools.islice(self.indices(), dist.get_rank(), None, dist.get_world_size())

    def __len__(self):
        return self.size

    def indices(self):
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            yield from torch.randperm(self.size, generator=generator).tolist()


dist.init_process_group("gloo")
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(20, 6), torch.randint(0, 3, (20,)))
batches = iter(DataLoader(dataset, batch_size=4, sampler=InfiniteSampler(dataset)))
ddp = DistributedDataParallel(nn.Linear(6, 3))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
for _ in range(20):
    x, y = next(batches)
    optimizer.zero_grad()
    nn.functional.cross_entropy(ddp(x), y).backward()
    optimizer.step()
dist.destroy_process_group()
