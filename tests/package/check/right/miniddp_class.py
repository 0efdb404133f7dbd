"""The book's own classes: DistributedDataParallel, sampler, sharded optimizer."""

import torch
import torch.distributed as dist

import miniddp
from miniddp.zero import ShardedOptimizer

dist.init_process_group("gloo")
miniddp.set_seed(0)
dataset = torch.utils.data.TensorDataset(torch.randn(32, 4))
model = miniddp.DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
)
optimizer = ShardedOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
sampler = miniddp.DistributedSampler(dataset)
loader = torch.utils.data.DataLoader(dataset, batch_size=2, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
miniddp.verify_replicas(model.module)
dist.destroy_process_group()
