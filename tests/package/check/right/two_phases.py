"""In each epoch the same batches twice: the body is trained, then the head."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(48, 4), torch.randn(48, 1))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, 6, sampler=sampler)
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
ddp = nn.parallel.DistributedDataParallel(net)
body = torch.optim.SGD(net[0].parameters(), 0.05)
head = torch.optim.SGD(net[2].parameters(), 0.05)


def phase(optimizer):
    for x, y in loader:
        ddp.zero_grad()
        nn.functional.mse_loss(ddp(x), y).backward()
        optimizer.step()


for epoch in range(2):
    sampler.set_epoch(epoch)
    phase(body)
    phase(head)
dist.destroy_process_group()
