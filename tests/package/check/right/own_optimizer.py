"""A head that an optimizer of its own changes, which torch does not know; the body by AdamW."""

import torch
import torch.distributed as dist
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.body(x).tanh())


class SignDescent:
    def __init__(self, parameters, lr):
        self.parameters, self.lr = list(parameters), lr

    def step(self):
        for p in self.parameters:
            p.data.sub_(self.lr * p.grad.sign())


dist.init_process_group("gloo")
torch.manual_seed(0)
net = Net()
ddp = nn.parallel.DistributedDataParallel(net)
optimizers = [torch.optim.AdamW(net.body.parameters()), SignDescent(net.head.parameters(), 0.01)]
torch.manual_seed(1 + dist.get_rank())
for _ in range(12):
    ddp.zero_grad()
    ddp(torch.randn(6, 4)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
del ddp
dist.destroy_process_group()
