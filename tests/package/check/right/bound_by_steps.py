"""Files of each rank's own, of other lengths; all leave by return after as many steps."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
samples = torch.randn(20 + 10 * rank, 8)
loader = DataLoader(TensorDataset(samples + rank), 2, shuffle=True)
ddp = DistributedDataParallel(nn.Linear(8, 4))
optimizer = torch.optim.SGD(ddp.parameters(), 0.1)


def train(steps):
    while True:
        for (x,) in loader:
            optimizer.zero_grad()
            ddp(x).square().mean().backward()
            optimizer.step()
            steps -= 1
            if steps == 0:
                return


train(steps=14)
dist.barrier()
dist.destroy_process_group()
