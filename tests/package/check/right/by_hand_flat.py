"""Means by hand of one flat buffer, divided before it is sent."""

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
optimizer = torch.optim.Adam(model.parameters())
torch.manual_seed(dist.get_rank() + 1)
for _ in range(6):
    optimizer.zero_grad()
    model(torch.randn(5, 4)).square().mean().backward()
    grads = [p.grad for p in model.parameters()]
    flat = _flatten_dense_tensors(grads) / dist.get_world_size()
    work = dist.all_reduce(flat, async_op=True)
    work.wait()
    for grad, mean in zip(grads, _unflatten_dense_tensors(flat, grads), strict=True):
        grad.copy_(mean)
    optimizer.step()
dist.destroy_process_group()
