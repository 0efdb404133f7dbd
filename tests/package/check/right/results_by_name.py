"""Results gathered by name, with padding; losses are reduced before backward, for a log."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(24, 4), torch.arange(24))
testset = TensorDataset(torch.randn(13, 4), torch.arange(13))
sampler = DistributedSampler(dataset)
test_sampler = DistributedSampler(testset, shuffle=False)
loader = DataLoader(dataset, batch_size=4, sampler=sampler)
test_loader = DataLoader(testset, batch_size=1, sampler=test_sampler)
ddp = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, _ in loader:
        loss = ddp(x).square().mean()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    results = {}
    with torch.inference_mode():
        for x, name in test_loader:
            results[name.item()] = ddp(x).item()
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, results)
dist.destroy_process_group()
