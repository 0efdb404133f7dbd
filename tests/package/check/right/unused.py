"""A branch that some steps leave out, with find_unused_parameters."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 1)
        self.b = nn.Linear(4, 1)

    def forward(self, x, use_b):
        return self.b(x) if use_b else self.a(x)


model = DistributedDataParallel(Branches(), find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(10):
    optimizer.zero_grad()
    model(torch.randn(3, 4), (i + dist.get_rank()) % 2 == 0).sum().backward()
    optimizer.step()
dist.destroy_process_group()
