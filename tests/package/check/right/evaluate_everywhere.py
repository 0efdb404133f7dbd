"""Each rank evaluates all of the validation set, as often as it likes, and keeps its number."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
g = torch.Generator().manual_seed(3)
data = TensorDataset(torch.randn(40, 4, generator=g))
held_out = DataLoader(TensorDataset(torch.randn(12, 4, generator=g)), batch_size=4)
ddp = nn.parallel.DistributedDataParallel(nn.Linear(4, 3))
opt = torch.optim.SGD(ddp.parameters(), lr=0.1)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=5, sampler=sampler)


def evaluate():
    with torch.no_grad():
        return sum(ddp.module(x).square().sum().item() for (x,) in held_out)


best = evaluate()
for epoch in range(2):
    sampler.set_epoch(epoch)
    for i, (x,) in enumerate(loader):
        if i % 2 == 0:
            best = min(best, evaluate())
        opt.zero_grad()
        ddp(x).square().mean().backward()
        opt.step()
dist.destroy_process_group()
