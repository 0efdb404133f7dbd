"""Two tasks in turn, from one line: their losses are meant to add up."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 12)
        self.heads = nn.ModuleDict({"depth": nn.Linear(12, 1), "seg": nn.Linear(12, 3)})

    def forward(self, x, task):
        return self.heads[task](self.body(x).relu())


losses = {
    "depth": lambda output, x: F.l1_loss(output[:, 0], x.norm(dim=1)),
    "seg": lambda output, x: F.cross_entropy(output, x.argmax(1) % 3),
}
dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.parallel.DistributedDataParallel(Net(), find_unused_parameters=True)
optimizer = torch.optim.Adam(net.parameters(), 1e-2)
generator = torch.Generator().manual_seed(31 + dist.get_rank())
for _ in range(10):
    optimizer.zero_grad()
    for task, loss in losses.items():
        x = torch.randn(8, 6, generator=generator)
        loss(net(x, task), x).backward()
    optimizer.step()
del net
dist.destroy_process_group()
