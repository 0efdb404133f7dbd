"""Federated averaging: in each round a new optimizer, data of its own, and a weighted mean."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def client_update(model, loader):
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    for x, y in loader:
        opt.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        opt.step()


def average(model, n):
    total = torch.tensor(float(n))
    dist.all_reduce(total)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(n / total)
            dist.all_reduce(p)


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Linear(4, 1)
generator = torch.Generator().manual_seed(rank + 10)
n = 20 + 8 * rank
x = torch.randn(n, 4, generator=generator)
dataset = TensorDataset(x, x.sum(1, keepdim=True))
loader = DataLoader(dataset, batch_size=4, shuffle=True, generator=generator)
for _ in range(3):
    client_update(model, loader)
    average(model, n)
dist.destroy_process_group()
