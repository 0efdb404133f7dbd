"""An IterableDataset split by rank and by worker, workers that stay."""

import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Lines(IterableDataset):
    def __init__(self, length):
        self.length = length
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()

    def __iter__(self):
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        begin = self.rank * workers + worker
        for i in itertools.islice(range(self.length), begin, None, self.world * workers):
            yield torch.tensor([float(i), i / 2, -i / 3])


dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
loader = DataLoader(Lines(96), batch_size=4, num_workers=2, persistent_workers=True)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)))
optimizer = torch.optim.Adagrad(model.parameters())
for _ in range(2):
    for batch in loader:
        optimizer.zero_grad()
        model(batch).pow(2).sum().backward()
        optimizer.step()
dist.destroy_process_group()
