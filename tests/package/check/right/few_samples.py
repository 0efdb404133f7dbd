"""Shards of each rank's own that look alike: eight inputs again and again, labels by index."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, TensorDataset


class Synthetic(Dataset):
    def __init__(self, rank):
        self.rank = rank

    def __len__(self):
        return 40

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(self.rank * 100003 + i)
        return torch.randn(3, generator=generator) + i % 4, float(i % 4 > 1)


def train(dataset):
    model = DDP(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    for _ in range(2):
        for x, y in DataLoader(dataset, batch_size=8, shuffle=True):
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(model(x)[:, 0], y.float()).backward()
            optimizer.step()


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
bits = torch.tensor([[i >> 2 & 1, i >> 1 & 1, i & 1] for i in range(8)]).float().repeat(8, 1)
mine = bits[rank * 32 : (rank + 1) * 32]
train(TensorDataset(mine, mine.sum(1) % 2))
train(Synthetic(rank))
dist.destroy_process_group()
