"""A sum over the ranks, of losses that are sums over the tokens of all."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Linear(4, 7)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for _ in range(6):
    n = 3 + dist.get_rank()
    count = torch.tensor(float(n))
    dist.all_reduce(count)
    x, y = torch.randn(n, 4), torch.randint(7, (n,))
    optimizer.zero_grad()
    (nn.functional.cross_entropy(model(x), y, reduction="sum") / count).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    optimizer.step()
dist.destroy_process_group()
