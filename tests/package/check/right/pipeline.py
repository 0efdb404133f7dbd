"""Two stages of a model on two ranks, by send and recv: not data parallel."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
stage = nn.Linear(4, 4)
optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
for _ in range(5):
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        hidden = stage(torch.randn(2, 4))
        dist.send(hidden.detach(), 1)
        gradient = torch.empty(2, 4)
        dist.recv(gradient, 1)
        hidden.backward(gradient)
    else:
        hidden = torch.empty(2, 4)
        dist.recv(hidden, 0)
        hidden.requires_grad_()
        stage(hidden).square().mean().backward()
        dist.send(hidden.grad, 0)
    optimizer.step()
dist.destroy_process_group()
