"""Each rank evaluates a slice of its own length; sums and counts are added up."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
g = torch.Generator().manual_seed(3)
data = TensorDataset(torch.randn(41, 4, generator=g), torch.randint(3, (41,), generator=g))
ddp = nn.parallel.DistributedDataParallel(nn.Linear(4, 3))
opt = torch.optim.SGD(ddp.parameters(), lr=0.1, nesterov=True, momentum=0.9)
sampler = DistributedSampler(data, drop_last=True)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(data, batch_size=5, sampler=sampler):
        opt.zero_grad()
        nn.functional.cross_entropy(ddp(x), y).backward()
        opt.step()
    ddp.eval()
    counts = torch.zeros(2)
    own = Subset(data, range(rank, len(data), world))
    with torch.inference_mode():
        for x, y in DataLoader(own, batch_size=7):
            counts[0] += (ddp.module(x).argmax(1) == y).sum()
            counts[1] += len(y)
    dist.all_reduce(counts)
    ddp.train()
assert counts[1] == 41
dist.destroy_process_group()
