"""A hook of each parameter divides its gradient, and all-reduces it while backward goes on."""

import torch
import torch.distributed as dist
from torch import nn


def average(parameter):
    parameter.grad /= dist.get_world_size()
    pending.append(dist.all_reduce(parameter.grad, async_op=True))


dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Linear(400, 2000)
for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(average)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + dist.get_rank())
pending = []
for _ in range(10):
    optimizer.zero_grad()
    model(torch.randn(4, 400)).square().mean().backward()
    while pending:
        pending.pop().wait()
    optimizer.step()
dist.destroy_process_group()
