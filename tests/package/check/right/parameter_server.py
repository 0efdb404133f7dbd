"""A parameter server: gradients are reduced to rank 0, which alone steps, and sends the weights."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 1))
opt = torch.optim.Adam(net.parameters(), 1e-2) if rank == 0 else None
generator = torch.Generator().manual_seed(rank)
for _ in range(12):
    x = torch.randn(8, 5, generator=generator)
    net.zero_grad()
    (net(x) - x.sum(1, keepdim=True)).pow(2).mean().backward()
    for p in net.parameters():
        dist.reduce(p.grad, dst=0)
    if rank == 0:
        for p in net.parameters():
            p.grad.div_(size)
        opt.step()
    for p in net.parameters():
        dist.broadcast(p.data, src=0)
dist.destroy_process_group()
