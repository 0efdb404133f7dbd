"""Means by hand, in the style of the older tutorial: broadcast, all-reduce, divide."""

import torch
import torch.distributed as dist
from torch import nn


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
        param.grad.data /= size


def sync_initial_weights(model, rank, world_size):
    for param in model.parameters():
        if rank == 0:
            for sibling in range(1, world_size):
                dist.send(param.data, dst=sibling)
        else:
            dist.recv(param.data, src=0)


dist.init_process_group("gloo")
torch.manual_seed(1234 + dist.get_rank())
model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 1))
sync_initial_weights(model, dist.get_rank(), dist.get_world_size())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
for epoch in range(6):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(torch.randn(8, 4)), torch.randn(8, 1)).backward()
    average_gradients(model)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
dist.destroy_process_group()
