"""An expert of each rank's own, which the wrapper is told to leave alone."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)
        torch.manual_seed(1 + rank)
        self.expert = nn.Linear(8, 8)

    def forward(self, x):
        return self.head(self.expert(self.body(x)).relu())


net = Net()
DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
    net, ["expert.weight", "expert.bias"]
)
ddp = DistributedDataParallel(net)
optimizer = torch.optim.Adam(ddp.parameters())
generator = torch.Generator().manual_seed(0)
samples = TensorDataset(
    torch.randn(96, 8, generator=generator), torch.randint(0, 4, (96,), generator=generator)
)
for x, y in DataLoader(samples, 6, sampler=DistributedSampler(samples)):
    optimizer.zero_grad()
    F.cross_entropy(ddp(x), y).backward()
    optimizer.step()
dist.destroy_process_group()
